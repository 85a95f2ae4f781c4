// The filled text: given text, and each filled token as an element shaded by its probability. Sequences of characters are shown in groups of ten
// with their positions. Elements are reused while only tokens change, so that focus and pointer stay where they are.

import { element, icon, percent } from "./dom.js";
import { describe } from "./marks.js";
import { classOf } from "./alphabet.js";

export class Sheet {
  // `lock(blank)` is called when the padlock of a blank is pressed.
  constructor(root, lock) {
    Object.assign(this, { root, lock });
    this.key = "";
    this.drawn = new WeakMap(); // what each element shows at present
    root.addEventListener("focusin", (event) => this.rove(event.target.closest(".token")));
    root.addEventListener("keydown", (event) => this.walk(event));
  }

  // Draw a view: {parsed, sample, fresh, busy, kind, moves}; sample is null before the first fill.
  render(view) {
    const blanks = view.parsed.marks.map((mark, k) => {
      const fill = view.sample?.fills[k] ?? (mark.low === mark.high ? Array(mark.low).fill(null) : null);
      return { mark, fill, unknown: fill === null };
    });
    const key = JSON.stringify([view.kind, view.parsed.pieces, blanks.map(({ mark, fill }) => fill?.length ?? describe(mark.low, mark.high))]);
    if (key !== this.key) {
      this.key = key;
      this.build(view, blanks);
    }
    blanks.forEach(({ fill, unknown }, k) => {
      if (unknown) return;
      fill.forEach((token, i) => this.drawToken(this.tokens[k][i], token, view, k, i, fill.length));
      this.locks[k].hidden = view.busy || !fill.length || fill.includes(null);
    });
    this.root.classList.toggle("busy", view.busy);
  }

  build(view, blanks) {
    this.tokens = blanks.map(({ mark, fill, unknown }, k) => (unknown ? [this.makeUnknown(mark)] : fill.map((_, i) => this.makeToken(k, i))));
    this.locks = blanks.map((_, k) => this.makeLock(k));
    this.root.replaceChildren(...(view.kind === "text" ? this.running(view.parsed.pieces) : this.grouped(view.parsed.pieces, blanks, view.kind)));
    this.root.dataset.kind = view.kind;
    const first = this.root.querySelector(".token:not(.unknown)");
    if (first) first.tabIndex = 0;
  }

  running(pieces) {
    return pieces.flatMap((piece, k) => [
      piece,
      ...(k < this.tokens.length ? [element("span", { class: "fill" }, ...this.tokens[k].flatMap((node) => [document.createTextNode(""), node]), this.locks[k])] : []),
    ]);
  }

  // Return groups of ten characters; a position after a blank of unknown length is a lower bound.
  grouped(pieces, blanks, kind) {
    const units = [];
    let sure = true;
    pieces.forEach((piece, k) => {
      for (const letter of piece) units.push({ node: element("span", { class: `letter is-${classOf(kind, letter)}` }, letter), sure });
      const tokens = this.tokens[k] ?? [];
      sure &&= !blanks[k]?.unknown;
      tokens.forEach((node) => units.push({ node, sure }));
      if (tokens.length) {
        const last = element("span", { class: "last" }, tokens.at(-1), this.locks[k]);
        units.at(-1).node = last;
      }
    });
    const tens = [];
    for (let at = 0; at < units.length; at += 10) {
      const ten = units.slice(at, at + 10);
      tens.push(element("span", { class: "ten" }, element("span", { class: "position" }, (ten[0].sure ? "" : "≥ ") + (at + 1)), ...ten.map((unit) => unit.node)));
    }
    return tens;
  }

  makeToken(blank, index) {
    return element("span", { class: "token open", role: "button", tabindex: -1, "data-blank": blank, "data-index": index });
  }

  makeUnknown(mark) {
    return element("span", { class: "token open unknown", role: "img", "aria-label": `blank, ${describe(mark.low, mark.high)}` }, mark.high === null ? "…" : `${mark.low}–${mark.high}`);
  }

  makeLock(blank) {
    const label = `Keep the fill of blank ${blank + 1}: it becomes given text`;
    return element("button", { type: "button", class: "lock", "aria-label": label, title: label, hidden: true, onclick: () => this.lock(blank) }, icon("lock"));
  }

  drawToken(node, token, { parsed, fresh, kind, moves }, blank, index, count) {
    const last = this.drawn.get(node);
    if (last?.token === token && last.fresh === fresh) return;
    this.drawn.set(node, { token, fresh });
    const place = `${index + 1} of ${count} in blank ${blank + 1}`;
    const draft = token !== null && (token.draft || !fresh);
    const letter = kind !== "text" && token?.text ? ` is-${classOf(kind, token.text)}` : "";
    node.className = "token" + (token === null ? " open" : draft ? " draft" : "") + letter;
    if (token === null) {
      node.textContent = "";
      if (kind === "text") node.previousSibling.data = "";
      node.setAttribute("aria-label", `open, ${place}`);
      return;
    }
    // The space at the start of a token is shown unshaded before it, unless the text before the blank already shows it.
    const lead = kind === "text" && /^ (?=\S)/.test(token.text) ? " " : "";
    const shown = moves && index === 0 && parsed.pieces[blank].endsWith(" ");
    if (kind === "text") node.previousSibling.data = shown ? "" : lead;
    const text = token.text.slice(lead.length);
    if (node.textContent !== text) node.textContent = text;
    const p = Math.exp(token.logProb);
    node.style.setProperty("--p", Math.sqrt(p).toFixed(3)); // the square root spreads small probabilities
    node.setAttribute("aria-label", `${token.text.trim() || "space"}, ${draft ? "draft" : percent(p)}, ${place}`);
  }

  token(blank, index) { return this.tokens[blank]?.[index] ?? null; }

  rove(token) {
    if (!token) return;
    this.root.querySelectorAll('.token[tabindex="0"]').forEach((other) => (other.tabIndex = -1));
    token.tabIndex = 0;
  }

  walk(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!steps || !event.target.matches(".token")) return;
    const all = [...this.root.querySelectorAll(".token:not(.unknown)")];
    all[all.indexOf(event.target) + steps]?.focus();
    event.preventDefault();
  }

  // Move the keyboard focus into the filled text.
  focus() {
    (this.root.querySelector('.token[tabindex="0"]') ?? this.root).focus();
  }
}
