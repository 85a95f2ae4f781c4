// The controls below the text, as one plain value and back.

import { byId, element } from "./dom.js";

// null: what the model and the quality say.
export const DEFAULTS = { quality: null, mode: null, order: null, temperature: null, top_p: null, seed: null, n: 1 };

// The first mode that a model has is its default. Mode `ar` is left out: it sees only the text before a blank.
const MODES = { car: "CAR: left to right", ac: "AC: any order", diffusion: "Diffusion: reverse process" };
const QUALITIES = { best: "best: several compared", fast: "fast: shown as it arrives", raw: "raw: exact samples" };
const LEAST = { n: 1, seed: 0 }, MOST = { n: 16, seed: 2 ** 53 - 1 };

export class Settings {
  // `changed()` is called after every change by the user.
  constructor(changed) {
    this.generation = { quality: "raw", temperature: 1, top_p: 1 };
    this.fields = Object.fromEntries(["quality", "mode", "order", "temperature", "top_p", "seed", "n"].map((name) => [name, byId(name)]));
    for (const field of Object.values(this.fields)) {
      field.addEventListener("input", () => {
        if (field === this.fields.quality) this.reset();
        this.show();
        changed();
      });
    }
  }

  // Offer the modes of a model.
  offer(model) {
    const modes = Object.keys(MODES).filter((mode) => model.modes?.includes(mode));
    this.fields.mode.replaceChildren(...modes.map((mode) => element("option", { value: mode }, MODES[mode])));
    this.offersModes = modes.length > 1;
    // Only an exact joint probability can be searched.
    const qualities = Object.keys(QUALITIES).filter((name) => name !== "best" || model.modes?.includes("car"));
    this.generation = { ...this.generation, ...model.generation };
    if (!qualities.includes(this.generation.quality)) this.generation.quality = "fast";
    this.fields.quality.replaceChildren(...qualities.map((name) => element("option", { value: name }, QUALITIES[name])));
    this.fields.quality.value = this.generation.quality;
    this.reset();
    this.show();
  }

  // What temperature or top-p is unless the user changes it.
  own(name) { return this.fields.quality.value === "raw" ? 1 : this.generation[name]; }

  // Set temperature and top-p to those of the quality.
  reset() {
    for (const name of ["temperature", "top_p"]) this.fields[name].value = this.own(name);
  }

  get value() {
    const { quality, mode, order, seed, n } = this.fields;
    return {
      quality: quality.value || null,
      mode: this.searched ? null : mode.value || null,
      order: this.ordered ? order.value : null,
      temperature: this.changed("temperature"),
      top_p: this.changed("top_p"),
      seed: seed.value === "" ? null : whole(seed.value, "seed"),
      n: whole(n.value, "n"),
    };
  }

  // The value of temperature or top-p if it differs from the quality's own, else null.
  changed(name) {
    const value = Number(this.fields[name].value);
    return this.searched || value === this.own(name) ? null : value;
  }

  set(value) {
    for (const [name, field] of Object.entries(this.fields)) {
      const own = name === "quality" ? this.generation.quality : name === "temperature" || name === "top_p" ? this.own(name) : DEFAULTS[name];
      const given = value[name] ?? own;
      if (given !== null) field.value = given;
      else if (name === "seed") field.value = "";
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0;
    }
    this.show();
  }

  get searched() { return this.fields.quality.value === "best"; }
  get ordered() { return !this.searched && this.fields.mode.value === "ac"; }

  show() {
    this.fields.order.disabled = !this.ordered;
    this.fields.mode.disabled = this.searched || !this.offersModes;
    for (const name of ["temperature", "top_p"]) this.fields[name].disabled = this.searched;
    byId("temperature-value").textContent = Number(this.fields.temperature.value).toFixed(2);
    byId("top_p-value").textContent = Number(this.fields.top_p.value).toFixed(2);
  }
}

function whole(text, name) {
  return Math.min(MOST[name], Math.max(LEAST[name], Math.floor(Number(text)) || LEAST[name]));
}
