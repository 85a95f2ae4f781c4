// Undo and redo over the whole state: the text, its selection and what was filled. Typing in one go is one step.

const PAUSE = 1000; // milliseconds after which typing begins a new step
const MOST = 200;

export class History {
  constructor(state) {
    this.past = [];
    this.future = [];
    this.now = state;
    this.typed = 0;
  }

  // A new state; `kind` "typing" joins the step before it, if that was typing too and not long ago.
  push(state, kind) {
    const time = performance.now();
    if (kind !== "typing" || time - this.typed > PAUSE) this.past = [...this.past.slice(1 - MOST), this.now];
    this.typed = kind === "typing" ? time : 0;
    this.now = state;
    this.future = [];
  }

  // The same step, seen later: fills that arrived do not make a step of their own.
  amend(changes) {
    this.now = { ...this.now, ...changes };
  }

  undo() { return this.move(this.past, this.future); }
  redo() { return this.move(this.future, this.past); }

  move(from, to) {
    if (!from.length) return null;
    to.push(this.now);
    this.now = from.pop();
    this.typed = 0;
    return this.now;
  }
}
