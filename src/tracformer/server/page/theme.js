// Dark or light theme: the system's, until the user switches it. Loaded before the first paint.

import { keep, recall } from "./memory.js";

const KEY = "tracformer-theme";
const root = document.documentElement;
const chosen = recall("localStorage", KEY);
if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;

export function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function switchTheme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  keep("localStorage", KEY, root.dataset.theme);
}
