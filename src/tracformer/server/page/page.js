// The page: holds the state (text, fills, settings) and connects the parts.

import * as api from "./api.js";
import { cleaned, kindOf } from "./alphabet.js";
import { Candidates } from "./candidates.js";
import { byId } from "./dom.js";
import { Editor } from "./editor.js";
import { examplesFor } from "./examples.js";
import { begin, carried, completed, hasTokens, hear, isComplete, lockBlank, lockToken } from "./fills.js";
import { History } from "./history.js";
import { adopted, parse, write } from "./marks.js";
import { tokensToBlank } from "./blanking.js";
import { Settings } from "./settings.js";
import { bodyOf, copy, fromHash, toHash } from "./share.js";
import { Sheet } from "./sheet.js";
import { showFigures, showScore } from "./figures.js";
import * as chrome from "./chrome.js";

const TOP = 6; // candidates of each token

const state = { text: "", run: null, at: 0, model: null, kind: "text", filling: null, wanted: null };
const history = new History({ text: "", selection: [0, 0], run: null, at: 0 });
const settings = new Settings(() => remember());
const sheet = new Sheet(byId("sheet"), (blank) => keep(blank));
const candidates = new Candidates(byId("sheet"), byId("candidates"), { about, choose, keep, alternative });
const editor = new Editor(byId("text"), byId("mirror"), byId("bubble"), { changed: edited, preview, blank });

const parsed = () => parse(state.text);
const sample = () => state.run?.samples[state.at] ?? null;
const moves = () => state.model?.tokenizer === "bpe";

// Drawing

let asked = 0;

// Draw at the next frame: tokens arrive faster than the screen refreshes.
function paint() {
  asked ||= requestAnimationFrame(draw);
}

function draw() {
  cancelAnimationFrame(asked);
  asked = 0;
  const text = parsed();
  const busy = state.filling !== null;
  sheet.render({ parsed: text, sample: sample(), fresh: Boolean(state.run?.fresh), busy, kind: state.kind, moves: moves() });
  candidates.refresh();
  chrome.showProblem(text.problem);
  chrome.showBusy(busy, text, state.run);
  chrome.showPager(state.run, state.at);
  chrome.showSteps(history);
  showFigures(state.run, state.at);
}

// Show the text while a grip is dragged, before the edit itself.
function preview(dragged) {
  if (!dragged) return draw();
  const { blank: k, low, high } = dragged;
  const text = parsed();
  text.marks[k] = { ...text.marks[k], low, high };
  const without = sample() && { ...sample(), fills: sample().fills.map((fill, i) => (i === k ? null : fill)) };
  sheet.render({ parsed: text, sample: without, fresh: false, busy: false, kind: state.kind, moves: moves() });
}

// Editing

function edited(text, kind) {
  if (text === state.text) return draw();
  stop();
  const run = carried(state.run, parsed(), parse(text), state.text, text);
  enter({ text, run, at: run ? state.at : 0 }, kind);
}

// Enter a new state of text and fills, as an undo step.
function enter(changes, kind = "step") {
  Object.assign(state, changes);
  history.push({ text: state.text, selection: editor.selection, run: state.run, at: state.at }, kind);
  chrome.clearError();
  showScore(null);
  remember();
  draw();
}

function travel(step) {
  if (!step) return;
  stop();
  Object.assign(state, { text: step.text, run: step.run, at: step.at });
  editor.set(step.text, step.selection);
  showScore(null);
  remember();
  draw();
}

// Turn the selected words, or the word at the caret, into a blank of the same number of tokens.
async function blank() {
  const before = editor.text;
  const { start, stop: end, content } = await tokensToBlank(before, editor.selection, state.kind, api.tokenize);
  if (editor.text !== before) return; // the text was edited while the server counted
  editor.replace(start, end, `[[${content}]]`);
  editor.area.focus();
}

// Filling

async function fill() {
  if (state.filling || !state.model) return;
  if (!parsed().marks.length && adopted(state.text) !== state.text) {
    const text = adopted(state.text);
    editor.set(text, [text.length, text.length]);
    edited(text, "step");
    chrome.toast("Marks of other programs are blanks now");
  }
  const text = parsed();
  if (text.problem || !text.marks.length) {
    return chrome.showError({ message: text.problem || "No blank in the text. Select some words and press Blank, or write [[8]] for eight missing tokens." });
  }
  const control = new AbortController();
  const wanted = settings.value, before = { run: state.run, at: state.at };
  const again = Boolean(before.run?.fresh);
  if (again) history.push(history.now, "step"); // undo restores the current fill
  Object.assign(state, { filling: control, run: begin(wanted.n, text.marks), at: 0, wanted });
  chrome.clearError();
  showScore(null);
  draw();
  chrome.announce("Filling.");
  try {
    await api.infill({ ...bodyOf(state.text, wanted), model: state.model.id, top: TOP }, (name, data) => {
      if (state.filling !== control) return;
      state.run = hear(state.run, name, data);
      paint();
    }, control.signal);
  } catch (error) {
    if (state.filling !== control || error.name === "AbortError") return;
    if (!state.run.samples.some(hasTokens)) {
      Object.assign(state, before);
      if (again) history.past.pop();
    }
    finish("");
    return chrome.showError(error, fill, setKey);
  }
  if (state.filling === control) finish(`Filled. ${sample().result.text}`);
}

function finish(told) {
  state.filling = null;
  history.amend({ run: state.run, at: state.at });
  remember();
  draw();
  chrome.announce(told);
}

function stop() {
  if (!state.filling) return;
  state.filling.abort();
  finish("Stopped.");
}

function alternative(steps) {
  const count = state.run?.samples.length ?? 0;
  if (count < 2) return;
  state.at = (state.at + steps + count) % count;
  history.amend({ at: state.at });
  showScore(null);
  candidates.hide();
  draw();
  chrome.announce(`Alternative ${state.at + 1} of ${count}. ${sample().result?.text ?? ""}`);
}

// Locking

function about(blank, index) {
  const fill = sample()?.fills[blank];
  return fill && { token: fill[index], count: fill.length, lockable: !state.filling && !fill.includes(null) };
}

function keep(blank) {
  if (state.filling) return;
  locked(lockBlank(parsed(), state.run, state.at, blank, moves()), "The fill is given text now.");
}

function choose(blank, index, text) {
  if (state.filling) return;
  locked(lockToken(parsed(), state.run, state.at, blank, index, text, moves()), `“${text.trim()}” is given text now.`);
}

function locked({ text, run }, told) {
  candidates.hide();
  editor.set(text, [text.length, text.length]);
  enter({ text, run, at: 0 });
  const rest = parse(text).marks.length;
  chrome.announce(told + (rest ? ` ${rest} blank${rest > 1 ? "s" : ""} left to fill again.` : ""));
  (rest ? byId("fill") : byId("text")).focus({ preventScroll: true });
}

// Scores, links, code

const full = () => sample()?.result?.text ?? (sample()?.fills.every(isComplete) ? completed(parsed(), sample().fills, moves()) : null);

async function score() {
  if (!state.model) return;
  const marked = parsed().marks;
  const literal = marked.length > 0 && marked.every((mark) => mark.problem && mark.content);
  const text = marked.length && !literal ? full() : null;
  if (marked.length && !literal && text === null) return chrome.showError({ message: "Fill the blanks first: a text with open blanks has no score." });
  try {
    const scored = await api.score({ text: literal ? state.text : write([text ?? parsed().pieces[0]], []), model: state.model.id });
    showScore(scored, literal ? "Marked parts" : "Whole text");
    chrome.announce(byId("score-figures").textContent);
  } catch (error) {
    chrome.showError(error, score, setKey);
  }
}

// Whether the fill shown belongs to the current text and settings.
const answered = () => Boolean(state.run?.fresh && sample()?.result) && JSON.stringify(state.wanted) === JSON.stringify(settings.value);

// Settings for links and code; a drawn seed is included so that they give the same fill.
function shared() {
  const wanted = settings.value;
  return { ...wanted, seed: wanted.seed ?? (answered() ? state.run.seed : null) };
}

let timer = 0;
function remember() {
  clearTimeout(timer);
  timer = setTimeout(() => window.history.replaceState(null, "", link()), 150);
}

const link = () => toHash({ text: state.text, model: several ? state.model?.id : null, ...shared(), run: answered() });

async function copyLink() {
  clearTimeout(timer);
  window.history.replaceState(null, "", link());
  await copy(location.href);
  chrome.toast("Link copied");
}

async function showCode() {
  const code = await import("./code.js");
  code.showCode(bodyOf(state.text, shared()), api.hasKey());
}

// Start

let several = false;

function useModel(model) {
  state.model = model;
  state.kind = kindOf(model);
  settings.offer(model);
  document.body.dataset.kind = state.kind;
  chrome.showModel(model, state.kind);
  chrome.showExamples(examplesFor(state.kind), (text) => {
    editor.set(text, [text.length, text.length]);
    edited(text, "step");
    fill();
  });
}

function restore(from) {
  settings.set(from);
  Object.assign(state, { text: from.text, run: null, at: 0 });
  editor.set(from.text, [from.text.length, from.text.length]);
  history.push({ text: state.text, selection: editor.selection, run: null, at: 0 }, "step");
  draw();
  if (from.run) fill();
}

function setKey(key) {
  api.setKey(key);
  return state.model ? fill() : start();
}

async function start() {
  let models;
  try {
    models = await api.models();
  } catch (error) {
    if (error.status !== 503) return chrome.showError(error, start, setKey);
    chrome.showLoading();
    return setTimeout(start, 1000);
  }
  chrome.clearError();
  several = models.length > 1;
  const from = fromHash(location.hash);
  const model = models.find((each) => each.id === from?.model) ?? models.find((each) => each.default) ?? models[0];
  chrome.offerModels(models, model, useModel);
  useModel(model);
  restore(from ?? { text: examplesFor(state.kind)[0].text });
  document.body.dataset.ready = "yes";
}

// Actions named like a button's id are run by that button.
chrome.listen({
  fill, stop, blank, score, code: showCode, link: copyLink, alternative, focusSheet: () => sheet.focus(),
  undo: () => travel(history.undo()),
  redo: () => travel(history.redo()),
  clear: () => editor.replace(0, editor.text.length, ""),
  copy: async () => {
    await copy(full() ?? state.text);
    chrome.toast("Text copied");
  },
});
byId("text").addEventListener("paste", (event) => {
  const text = event.clipboardData?.getData("text/plain");
  if (state.kind === "text" || !text) return;
  event.preventDefault();
  editor.replace(...editor.selection, cleaned(text, state.model.alphabet));
});
addEventListener("hashchange", () => {
  const from = fromHash(location.hash);
  if (from && state.model) {
    stop();
    restore(from);
  }
});
start();
