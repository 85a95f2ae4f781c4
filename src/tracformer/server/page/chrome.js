// Everything around the text: buttons, keyboard shortcuts, messages, dialogs, the model's name, the examples.

import { LEGENDS } from "./alphabet.js";
import { byId, element } from "./dom.js";
import { isDark, switchTheme } from "./theme.js";

const APPLE = /Mac|iPhone|iPad/.test(navigator.platform);

export function listen(actions) {
  const pressed = {
    ...actions,
    previous: () => actions.alternative(-1),
    next: () => actions.alternative(1),
    help: () => byId("help-dialog").showModal(),
    theme: () => {
      switchTheme();
      labelTheme();
    },
  };
  for (const [id, action] of Object.entries(pressed)) byId(id)?.addEventListener("click", () => action());
  labelTheme();
  byId("blank").addEventListener("pointerdown", (event) => event.preventDefault()); // keep the selection
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }
  document.addEventListener("keydown", (event) => keys(event, actions));
  byId("text").addEventListener("beforeinput", (event) => { // undo and redo from the browser's menu
    const action = { historyUndo: actions.undo, historyRedo: actions.redo }[event.inputType];
    if (!action) return;
    event.preventDefault();
    action();
  });
  if (APPLE) document.querySelectorAll("kbd").forEach((kbd) => kbd.textContent === "Ctrl" && (kbd.textContent = "⌘"));
}

function keys(event, actions) {
  const command = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
  const writing = event.target.matches("input, textarea, select");
  const history = event.target.id === "text" || !writing;
  if (document.querySelector("dialog[open]")) return;
  if (command && key === "enter") actions.fill();
  else if (command && key === "b" && event.target.id === "text") actions.blank();
  else if (command && key === "z" && history) (event.shiftKey ? actions.redo : actions.undo)();
  else if (command && key === "y" && history) actions.redo();
  else if (key === "escape") return actions.stop();
  else if (key === "f6") (event.target.id === "text" ? actions.focusSheet : () => byId("text").focus())();
  else if (key === "?" && !writing) byId("help-dialog").showModal();
  else return;
  event.preventDefault();
}

function labelTheme() {
  const label = isDark() ? "Light colours" : "Dark colours";
  byId("theme").setAttribute("aria-label", label);
  byId("theme").title = label;
}

// Messages

export function announce(text) {
  byId("live").textContent = text;
}

export function toast(text) {
  const box = byId("toast");
  box.textContent = text;
  box.classList.add("shown");
  announce(text);
  setTimeout(() => box.classList.remove("shown"), 1600);
}

let countdown = 0;

export function clearError() {
  clearInterval(countdown);
  byId("error").hidden = true;
}

// Show an error and what to do: `again` is called to try again, `setKey` with an API key.
export function showError(error, again, setKey) {
  clearError();
  const box = byId("error");
  const title = { 0: "No connection", 401: "API key needed", 408: "Time limit exceeded", 429: "The server is busy", 503: "The server is not ready" }[error.status];
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  box.replaceChildren(element("p", {}, title ? element("strong", {}, title + ". ") : "", message));
  if (error.status === 401 && setKey) box.append(keyForm(setKey));
  else if (again && error.status !== undefined && error.status !== 400 && error.status !== 413) {
    const retry = element("button", { type: "button", class: "plain", onclick: () => again() }, "Try again");
    box.append(retry);
    if (error.retryAfter) wait(retry, error.retryAfter);
  }
  box.hidden = false;
}

function wait(button, seconds) {
  let left = Math.ceil(seconds);
  const tick = () => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left-- <= 0) clearInterval(countdown);
  };
  countdown = setInterval(tick, 1000);
  tick();
}

function keyForm(setKey) {
  const field = element("input", { type: "password", name: "key", autocomplete: "off", "aria-label": "API key", placeholder: "API key" });
  const form = element("form", { class: "key" }, field, element("button", { class: "plain" }, "Use this key"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(field.value);
  });
  return form;
}

export function showProblem(problem) {
  byId("problem").textContent = problem;
  byId("text").setAttribute("aria-invalid", String(Boolean(problem)));
}

// The fill

export function showBusy(busy, parsed, run) {
  byId("fill").hidden = busy;
  byId("stop").hidden = !busy;
  byId("fill-label").textContent = run && !busy ? (run.fresh ? "Fill again" : "Fill the rest") : "Fill";
  byId("status").textContent = !busy ? "" : run.samples[0].fills.includes(null) ? "Finding the lengths…" : "Filling…";
  byId("sheet").setAttribute("aria-busy", String(busy));
  byId("nothing").hidden = parsed.marks.length > 0;
}

export function showPager(run, at) {
  const count = run?.samples.length ?? 0;
  byId("pager").hidden = count < 2;
  byId("page-number").textContent = `${at + 1} of ${count}`;
}

export function showSteps(history) {
  byId("undo").disabled = history.past.length < 2; // the first state is the empty page
  byId("redo").disabled = !history.future.length;
}

// The model and its examples

export function showLoading() {
  byId("model-facts").textContent = "The model is loading…";
}

export function offerModels(models, chosen, use) {
  const select = byId("model");
  select.replaceChildren(...models.map((model) => element("option", { value: model.id, selected: model === chosen }, model.id)));
  select.disabled = models.length < 2;
  select.onchange = () => use(models.find((model) => model.id === select.value));
}

export function showModel(model, kind) {
  const size = model.parameters >= 1e6 ? `${(model.parameters / 1e6).toFixed(1)} M parameters` : model.parameters ? `${Math.round(model.parameters / 1e3)} k parameters` : "";
  byId("model-facts").textContent = [size, model.max_length && `up to ${model.max_length} tokens`].filter(Boolean).join(" · ");
  byId("text").spellcheck = false;
  byId("classes").replaceChildren(...(LEGENDS[kind] ?? []).map(([name, label]) => element("li", { class: `is-${name}` }, label)));
}

export function showExamples(examples, use) {
  byId("examples").replaceChildren(
    ...examples.map(({ title, text }) => element("li", {}, element("button", { type: "button", class: "example", title: text, onclick: () => use(text) }, title))),
  );
}
