// A box with the most likely candidates for a token, opened by pointing, focus or a tap. Choosing a candidate locks it.

import { NARROW, element, icon, percent, place, visible } from "./dom.js";

const LINGER = 220; // milliseconds for the pointer to move from the token into the box

export class Candidates {
  // `about(blank, index)` returns {token, count, lockable}; `choose(blank, index, text)` locks a candidate; `keep(blank)` locks a whole fill.
  constructor(root, box, { about, choose, keep, alternative }) {
    Object.assign(this, { root, box, about, choose, keep, alternative });
    this.owner = null;
    this.timer = 0;
    root.addEventListener("pointerover", (event) => event.pointerType === "mouse" && this.soon(tokenOf(event), 60));
    root.addEventListener("pointerout", (event) => event.pointerType === "mouse" && tokenOf(event) && this.soon(null, LINGER));
    root.addEventListener("focusin", (event) => tokenOf(event) && this.show(tokenOf(event)));
    root.addEventListener("click", (event) => tokenOf(event) && this.show(tokenOf(event)));
    root.addEventListener("keydown", (event) => tokenOf(event) && this.key(event, tokenOf(event)));
    box.addEventListener("pointerenter", () => clearTimeout(this.timer));
    box.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.soon(null, LINGER));
    box.addEventListener("keydown", (event) => this.keyInside(event));
    document.addEventListener("pointerdown", (event) => {
      if (!box.contains(event.target) && !tokenOf(event)) this.hide();
    });
    document.addEventListener("focusin", (event) => {
      if (!box.contains(event.target) && !tokenOf(event)) this.hide();
    });
    addEventListener("scroll", () => this.owner && place(box, this.owner.getBoundingClientRect()), { passive: true });
  }

  soon(token, wait) {
    clearTimeout(this.timer);
    if (token === null && (this.box.contains(document.activeElement) || this.owner === document.activeElement)) return;
    this.timer = setTimeout(() => (token ? this.show(token) : this.hide()), wait);
  }

  show(token) {
    clearTimeout(this.timer);
    const { blank, index } = numbers(token);
    const known = this.about(blank, index);
    if (!known?.token) return this.hide();
    this.unmark();
    this.owner = token;
    token.classList.add("shown");
    this.fillBox(known, blank, index);
    this.box.hidden = false;
    place(this.box, token.getClientRects()[0] ?? token.getBoundingClientRect());
    const covered = token.getBoundingClientRect().bottom - this.box.getBoundingClientRect().top;
    if (matchMedia(NARROW).matches && covered > 0) scrollBy({ top: covered + 24 }); // on narrow screens the box is at the bottom
  }

  // Redraw the box after more of the text has arrived.
  refresh() {
    if (this.box.hidden) return;
    if (!this.owner?.isConnected) return this.hide();
    if (!this.box.contains(document.activeElement)) this.show(this.owner);
  }

  hide() {
    clearTimeout(this.timer);
    this.unmark();
    this.owner = null;
    this.box.hidden = true;
  }

  unmark() {
    this.owner?.classList.remove("shown");
  }

  fillBox({ token, count, lockable }, blank, index) {
    const chosen = token.candidates.some((candidate) => candidate.token_id === token.id);
    const others = chosen || token.draft ? token.candidates : [...token.candidates, { token_id: token.id, text: token.text, probability: Math.exp(token.logProb) }];
    this.box.replaceChildren(
      element("p", { class: "place" }, `Token ${index + 1} of ${count}`, token.draft ? element("em", {}, " still a draft") : ""),
      element("ol", {}, ...others.map((candidate) => element("li", {}, this.button(candidate, token, lockable, blank, index)))),
      lockable && element("button", { type: "button", class: "keep", onclick: () => this.keep(blank) }, icon("lock"), `Keep all of blank ${blank + 1}`),
    );
  }

  button(candidate, token, lockable, blank, index) {
    const same = candidate.token_id === token.id;
    const whole = candidate.text !== "" && !candidate.text.includes("\ufffd") && !/^<\|.*\|>$/.test(candidate.text);
    const spaced = /^ (?=\S)/.test(candidate.text) ? 1 : 0;
    const made = element(
      "button",
      {
        type: "button", class: same ? "candidate same" : "candidate", disabled: !lockable || !whole,
        "aria-label": `${candidate.text.trim() || visible(candidate.text)}, ${percent(candidate.probability)}${same ? ", chosen" : ""}`,
        title: whole ? "Lock this token in place" : "Not text by itself: it cannot be locked",
        onclick: () => this.choose(blank, index, candidate.text),
      },
      element("span", { class: "word" }, spaced && element("i", {}, "␣"), visible(candidate.text.slice(spaced))),
      element("span", { class: "odds" }, percent(candidate.probability)),
    );
    made.style.setProperty("--p", candidate.probability.toFixed(3));
    return made;
  }

  key(event, token) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { blank, index } = numbers(token);
    const buttons = [...this.box.querySelectorAll(".candidate:not(:disabled)")];
    const lockable = this.about(blank, index)?.lockable;
    if (event.key === "Escape" && !this.box.hidden) this.hide();
    else if (["Enter", " ", "ArrowDown"].includes(event.key)) {
      this.show(token);
      this.box.querySelector("button:not(:disabled)")?.focus();
    } else if (/^[1-9]$/.test(event.key) && !this.box.hidden) buttons[Number(event.key) - 1]?.click();
    else if (event.key === "l" && lockable) this.keep(blank);
    else if (event.key === "n") this.alternative(1);
    else if (event.key === "p") this.alternative(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  keyInside(event) {
    const buttons = [...this.box.querySelectorAll("button:not(:disabled)")];
    const at = buttons.indexOf(document.activeElement);
    if (event.key === "Escape") {
      const owner = this.owner;
      owner?.focus();
      this.hide();
    } else if (event.key === "ArrowDown") buttons[Math.min(at + 1, buttons.length - 1)].focus();
    else if (event.key === "ArrowUp" && at > 0) buttons[at - 1].focus();
    else if (event.key === "ArrowUp") this.owner?.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

const tokenOf = (event) => event.target.closest?.(".token:not(.unknown)") ?? null;
const numbers = (token) => ({ blank: Number(token.dataset.blank), index: Number(token.dataset.index) });
