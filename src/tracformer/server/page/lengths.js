// A small panel to type a blank's length: exact, a range, or chosen by the model.

import { element, place } from "./dom.js";

export class LengthPanel {
  constructor(set) {
    this.set = set;
    const number = (label) => element("input", { type: "number", min: 1, max: 9999, inputmode: "numeric", "aria-label": label, oninput: () => this.apply() });
    this.low = number("At least");
    this.high = number("At most");
    this.free = element("input", { type: "checkbox", onchange: () => this.apply() });
    this.box = element(
      "div",
      { class: "floating length-panel", role: "dialog", "aria-label": "Length of the blank", hidden: true },
      element("label", {}, "at least ", this.low),
      element("label", {}, "at most ", this.high),
      element("label", { class: "check" }, this.free, " the model chooses"),
      element("button", { type: "button", class: "plain", onclick: () => this.close() }, "Done"),
    );
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Escape" || event.key === "Enter") {
        event.preventDefault();
        event.stopPropagation();
        this.close();
      }
    });
    document.addEventListener("pointerdown", (event) => {
      if (!this.box.hidden && !this.box.contains(event.target)) this.box.hidden = true;
    });
    document.body.append(this.box);
  }

  open(k, low, high, owner) {
    Object.assign(this, { k, owner });
    this.low.value = low;
    this.high.value = high ?? "";
    this.free.checked = high === null;
    this.box.hidden = false;
    place(this.box, owner.getBoundingClientRect());
    (this.free.checked ? this.free : this.low).focus();
    this.low.select?.();
  }

  close() {
    this.box.hidden = true;
    this.owner?.focus();
  }

  apply() {
    if (this.free.checked) return this.set(this.k, 1, null);
    const low = Math.max(1, Math.floor(Number(this.low.value)) || 1);
    // Raising the lower bound above the upper one raises both; otherwise typing in one field never changes the other.
    const high = Math.max(low, Math.floor(Number(this.high.value)) || low);
    if (document.activeElement === this.low && this.high.value !== "" && Number(this.high.value) < low) this.high.value = low;
    this.set(this.k, low, high);
  }
}
