// The editor: a plain textarea, so that caret, selection, paste and input methods work as usual, under a mirror that draws the same characters
// with blanks as pills. The grip of a pill sets the length of its blank, by dragging or with the arrow keys.

import { element, place } from "./dom.js";
import { parse, contentOf, describe } from "./marks.js";

const STEP = 11; // pixels of dragging per token
const MOST = 512; // longest blank by dragging; a typed number may be larger

export class Editor {
  // `changed(text, kind)` is called after every edit; kind is "typing" or "step". `preview({blank, low, high})` is called while a grip is dragged, with null when it is released.
  constructor(area, mirror, bubble, { changed, preview, blank }) {
    Object.assign(this, { area, mirror, bubble, changed, preview });
    area.addEventListener("input", (event) => {
      this.draw();
      changed(area.value, event.inputType?.startsWith("insertFrom") ? "step" : "typing");
    });
    bubble.addEventListener("pointerdown", (event) => event.preventDefault()); // keep the selection
    bubble.addEventListener("click", () => blank());
    for (const name of ["select", "keyup", "pointerup", "focus", "blur"]) area.addEventListener(name, () => this.showBubble());
    document.addEventListener("selectionchange", () => this.showBubble());
    addEventListener("resize", () => this.showBubble());
    this.draw();
  }

  get text() { return this.area.value; }
  get selection() { return [this.area.selectionStart, this.area.selectionEnd]; }

  // Replace the whole text; the selection, if given, is set without taking the focus.
  set(text, selection) {
    if (this.area.value !== text) this.area.value = text;
    if (selection) this.area.setSelectionRange(...selection);
    this.draw();
    this.showBubble();
  }

  // Replace a part of the text, as one undo step.
  replace(start, stop, text, selection = [start + text.length, start + text.length]) {
    this.set(this.text.slice(0, start) + text + this.text.slice(stop), selection);
    this.changed(this.text, "step");
  }

  setLength(k, low, high) {
    const { start, stop } = parse(this.text).marks[k];
    this.replace(start, stop, `[[${contentOf(low, high)}]]`);
  }

  // Text and pills alternate. Only what differs is changed, so that a grip being dragged stays the same element.
  draw(shown = this.text) {
    const { marks } = parse(shown);
    const nodes = [...this.mirror.children];
    let at = 0;
    marks.forEach((mark, k) => {
      this.drawText(nodes[2 * k], shown.slice(at, mark.start));
      this.drawPill(nodes[2 * k + 1], k, mark, shown.slice(mark.start, mark.stop));
      at = mark.stop;
    });
    this.drawText(nodes[2 * marks.length], shown.slice(at) + "\u200b");
    nodes.slice(2 * marks.length + 1).forEach((node) => node.remove());
  }

  drawText(node, text) {
    if (!node) this.mirror.append((node = element("span", { "aria-hidden": "true" })));
    if (node.textContent !== text) node.textContent = text;
  }

  drawPill(pill, k, mark, text) {
    if (!pill) this.mirror.append((pill = this.makePill(k)));
    const [shown, grip] = pill.children;
    if (shown.textContent !== text) {
      shown.replaceChildren(element("i", {}, "[["), text.slice(2, -2), element("i", {}, "]]"));
    }
    pill.classList.toggle("wrong", Boolean(mark.problem));
    grip.hidden = Boolean(mark.problem);
    grip.setAttribute("aria-valuenow", mark.low);
    grip.setAttribute("aria-valuetext", describe(mark.low, mark.high));
    grip.title = `${describe(mark.low, mark.high)}: drag, or press to edit`;
  }

  makePill(k) {
    const grip = element("button", { type: "button", class: "grip", role: "slider", "aria-label": `Length of blank ${k + 1}`, "aria-valuemin": 1, "aria-valuemax": MOST });
    grip.addEventListener("pointerdown", (event) => this.drag(event, grip, k));
    grip.addEventListener("keydown", (event) => this.stepByKey(event, grip, k));
    return element("span", { class: "pill" }, element("span", { "aria-hidden": "true" }), grip);
  }

  drag(down, grip, k) {
    down.preventDefault();
    grip.focus();
    grip.setPointerCapture(down.pointerId);
    const { low, high, start, stop } = parse(this.text).marks[k];
    let now = [low, high], moved = false;
    const move = (event) => {
      const steps = Math.round((event.clientX - down.clientX) / STEP);
      if (!moved && !steps) return;
      moved = true;
      now = stepped(low, high, steps, event.shiftKey);
      this.draw(this.text.slice(0, start) + `[[${contentOf(...now)}]]` + this.text.slice(stop));
      this.preview({ blank: k, low: now[0], high: now[1] });
    };
    const end = (event) => {
      grip.removeEventListener("pointermove", move);
      grip.removeEventListener("pointerup", end);
      grip.removeEventListener("pointercancel", end);
      this.draw();
      const kept = event.type === "pointerup" && contentOf(...now) !== contentOf(low, high);
      if (kept) this.setLength(k, ...now);
      else this.preview(null);
      if (event.type === "pointerup" && !moved) this.openPanel(k, low, high, grip);
    };
    grip.addEventListener("pointermove", move);
    grip.addEventListener("pointerup", end);
    grip.addEventListener("pointercancel", end);
  }

  async openPanel(k, low, high, grip) {
    const { LengthPanel } = await import("./lengths.js"); // rarely used
    this.panel ??= new LengthPanel((blank, ...range) => this.setLength(blank, ...range));
    this.panel.open(k, low, high, grip);
  }

  stepByKey(event, grip, k) {
    const { low, high } = parse(this.text).marks[k];
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 5, PageDown: -5 }[event.key];
    if (steps) this.setLength(k, ...stepped(low, high, steps, event.shiftKey));
    else if (event.key === "Delete" || event.key === "Home") this.setLength(k, 1, null);
    else if (event.key === "Enter" || event.key === " ") this.openPanel(k, low, high, grip);
    else return;
    event.preventDefault();
  }

  // Show a button next to selected words.
  showBubble() {
    const [start, stop] = this.selection;
    const shown = document.activeElement === this.area && start < stop && /\S/.test(this.text.slice(start, stop));
    this.bubble.hidden = !shown;
    if (shown) place(this.bubble, this.rectOf(start, stop));
  }

  // Return the screen position of characters, measured in the mirror.
  rectOf(start, stop) {
    const range = document.createRange();
    const walker = document.createTreeWalker(this.mirror, NodeFilter.SHOW_TEXT);
    let at = 0;
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const length = node.data.length;
      if (at <= start && start <= at + length) range.setStart(node, start - at);
      if (at <= stop && stop <= at + length) range.setEnd(node, stop - at);
      at += length;
    }
    const rects = [...range.getClientRects()];
    return rects.at(-1) ?? this.mirror.getBoundingClientRect();
  }
}

// Return a blank's length changed by some steps: both bounds, or with `widen` only the upper one. A free length becomes a number first.
function stepped(low, high, steps, widen) {
  const clamp = (value) => Math.max(1, Math.min(MOST, value));
  if (high === null) return [clamp(4 + steps), clamp(4 + steps)];
  if (widen) return [low, Math.max(low, clamp(high + steps))];
  return [clamp(low + steps), clamp(low + steps) + (high - low)];
}
