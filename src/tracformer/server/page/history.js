// Undo and redo of the whole state: text, selection and fills. Continuous typing is one step.

const PAUSE = 1000; // milliseconds after which typing begins a new step
const MOST = 200;

export class History {
  constructor(state) {
    this.past = [];
    this.future = [];
    this.now = state;
    this.typed = 0;
  }

  // Add a state; of `kind` "typing" it joins the step before it if that was typing too, less than PAUSE ago.
  push(state, kind) {
    const time = performance.now();
    if (kind !== "typing" || time - this.typed > PAUSE) this.past = [...this.past.slice(1 - MOST), this.now];
    this.typed = kind === "typing" ? time : 0;
    this.now = state;
    this.future = [];
  }

  // Change the current state: fills that arrive are not a step of their own.
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
