// The same fill from elsewhere: a curl command and a few lines of Python. Loaded when first asked for.

import { address } from "./api.js";
import { byId } from "./dom.js";
import { copy } from "./share.js";

const VARIABLE = "TRACFORMER_API_KEY"; // the key itself stays out of what is copied

function asCurl(body, keyed) {
  const quoted = "'" + JSON.stringify(body, null, 2).replaceAll("'", "'\\''") + "'";
  return `curl ${address("v1/infill")} \\\n  -H 'Content-Type: application/json' \\\n${keyed ? `  -H "Authorization: Bearer $${VARIABLE}" \\\n` : ""}  -d ${quoted}`;
}

function asPython({ text, model, temperature, top_p, ...rest }, keyed) {
  const sampler = Object.entries({ temperature, top_p }).filter(([, value]) => value !== undefined).map(([name, value]) => `${name}=${value}`);
  const options = Object.entries(rest).map(([name, value]) => `    ${name}=${python(value)},`);
  if (sampler.length) options.push(`    sampler=Sampler(${sampler.join(", ")}),`);
  return [
    ...(keyed ? ["import os", ""] : []),
    "import tracformer",
    ...(sampler.length ? ["from tracformer.generation.samplers import Sampler"] : []),
    "",
    `client = tracformer.Client(${python(address("."))}${keyed ? `, api_key=os.environ["${VARIABLE}"]` : ""})`,
    "results = client.infill(",
    `    ${python(text)},`,
    ...options,
    ")",
    "for result in results:",
    "    print(result.text, result.log_prob)",
  ].join("\n");
}

// JSON's strings and numbers are Python's too.
const python = (value) => JSON.stringify(value);

// The dialog with both. `keyed`: the server wants a key.
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
