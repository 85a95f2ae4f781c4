// The current fill as a curl command and as Python code. Loaded on first use.

import { address } from "./api.js";
import { byId } from "./dom.js";
import { copy } from "./share.js";

const VARIABLE = "TRACFORMER_API_KEY"; // the key itself is never copied

function asCurl(body, keyed) {
  const quoted = "'" + JSON.stringify(body, null, 2).replaceAll("'", "'\\''") + "'";
  return `curl ${address("v1/infill")} \\\n  -H 'Content-Type: application/json' \\\n${keyed ? `  -H "Authorization: Bearer $${VARIABLE}" \\\n` : ""}  -d ${quoted}`;
}

function asPython({ text, model, ...options }, keyed) {
  return [
    ...(keyed ? ["import os", ""] : []),
    "import tracformer",
    "",
    `client = tracformer.Client(${python(address("."))}${keyed ? `, api_key=os.environ["${VARIABLE}"]` : ""})`,
    "results = client.infill(",
    `    ${python(text)},`,
    ...Object.entries(options).map(([name, value]) => `    ${name}=${python(value)},`),
    ")",
    "for result in results:",
    "    print(result.text, result.log_prob)",
  ].join("\n");
}

// JSON strings and numbers are valid Python.
const python = (value) => JSON.stringify(value);

// Open the dialog with both. `keyed`: the server needs a key.
export function showCode(body, keyed) {
  const codes = { curl: asCurl(body, keyed), python: asPython(body, keyed) };
  const dialog = byId("code-dialog"), shown = byId("code-text");
  const tabs = [...dialog.querySelectorAll('[role="tab"]')];
  const choose = (tab) => {
    tabs.forEach((each) => {
      each.setAttribute("aria-selected", String(each === tab));
      each.tabIndex = each === tab ? 0 : -1;
    });
    shown.textContent = codes[tab.dataset.code];
  };
  tabs.forEach((tab, i) => {
    tab.onclick = () => choose(tab);
    tab.onkeydown = (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[(i + 1) % tabs.length];
      other.focus();
      choose(other);
    };
  });
  byId("code-copy").onclick = async () => {
    await copy(shown.textContent);
    byId("code-copy").textContent = "Copied";
    setTimeout(() => (byId("code-copy").textContent = "Copy"), 1600);
  };
  choose(tabs[0]);
  dialog.showModal();
}
