// Client of the server's native protocol: plain requests, and fills as a stream of events.

import { keep, recall } from "./memory.js";

const KEY = "tracformer-key";
const STATUS = { invalid_request_error: 400, timeout_error: 408, unavailable_error: 503 }; // statuses of errors that arrive after a stream has begun
let key = recall("sessionStorage", KEY) ?? "";

export function setKey(value) {
  key = value;
  keep("sessionStorage", KEY, value);
}

export const hasKey = () => key !== "";

// An error answer of the server; status 0 if it cannot be reached.
export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const address = (path) => new URL(path, document.baseURI).href;

async function request(path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(address(path), { method: body === undefined ? "GET" : "POST", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const after = Number(response.headers.get("Retry-After"));
  return new ApiError(body?.error?.message ?? `The server answered ${response.status}.`, response.status, after || null);
}

export const models = async () => (await (await request("v1/models")).json()).data;
export const score = async (body) => (await request("v1/score", body)).json();
export const tokenize = async (text, inside) => (await (await request("v1/tokenize", { text, inside })).json()).tokens;

// Fill blanks: `hear(name, data)` is called with every event; returns when the stream has ended with its result.
// Quality `best` compares whole fills, so it has one event only.
export async function infill(body, hear, signal) {
  if (body.quality === "best") {
    const response = await request("v1/infill", body, signal);
    hear("result", await response.json().catch((error) => { throw error.name === "AbortError" ? error : new ApiError("The connection was lost."); }));
    return;
  }
  const response = await request("v1/infill", { ...body, stream: true }, signal);
  let done = false;
  try {
    for await (const { name, data } of events(response.body)) {
      if (name === "error") throw new ApiError(data.error.message, STATUS[data.error.type] ?? 500);
      hear(name, data);
      done ||= name === "result";
    }
  } catch (error) {
    throw error.name === "AbortError" || error instanceof ApiError ? error : new ApiError("The connection was lost.");
  }
  if (!done) throw new ApiError("The connection was lost before the fill was complete.");
}

// Yield the server-sent events of a body: blocks of `field: value` lines, separated by empty lines.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest = (rest + value).replaceAll("\r\n", "\n");
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length) yield { name, data: JSON.parse(data.join("\n")) };
    }
  }
}
