// The controls below the text, as one plain value and back.

import { byId, element } from "./dom.js";

export const DEFAULTS = { mode: null, order: null, temperature: 1, top_p: 1, seed: null, n: 1 };

// The first mode that a model has is its default. Mode `ar` is left out: it sees only the text before a blank.
const MODES = { car: "CAR: left to right", ac: "AC: any order", diffusion: "Diffusion: reverse process" };
const LEAST = { n: 1, seed: 0 }, MOST = { n: 16, seed: 2 ** 53 - 1 };

export class Settings {
  // `changed()` is called after every change by the user.
  constructor(changed) {
    this.fields = Object.fromEntries(["mode", "order", "temperature", "top_p", "seed", "n"].map((name) => [name, byId(name)]));
    for (const field of Object.values(this.fields)) {
      field.addEventListener("input", () => {
        this.show();
        changed();
      });
    }
  }

  // Offer the modes of a model.
  offer(model) {
    const modes = Object.keys(MODES).filter((mode) => model.modes?.includes(mode));
    this.fields.mode.replaceChildren(...modes.map((mode) => element("option", { value: mode }, MODES[mode])));
    this.fields.mode.disabled = modes.length < 2;
    this.show();
  }

  get value() {
    const { mode, order, temperature, top_p, seed, n } = this.fields;
    return {
      mode: mode.value || null,
      order: this.ordered ? order.value : null,
      temperature: Number(temperature.value),
      top_p: Number(top_p.value),
      seed: seed.value === "" ? null : whole(seed.value, "seed"),
      n: whole(n.value, "n"),
    };
  }

  set(value) {
    for (const [name, field] of Object.entries(this.fields)) {
      const given = value[name] ?? DEFAULTS[name];
      if (given !== null) field.value = given;
      else if (name === "seed") field.value = "";
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0;
    }
    this.show();
  }

  get ordered() { return this.fields.mode.value === "ac"; }

  show() {
    this.fields.order.disabled = !this.ordered;
    byId("temperature-value").textContent = Number(this.fields.temperature.value).toFixed(2);
    byId("top_p-value").textContent = Number(this.fields.top_p.value).toFixed(2);
  }
}

function whole(text, name) {
  return Math.min(MOST[name], Math.max(LEAST[name], Math.floor(Number(text)) || LEAST[name]));
}
