"use strict";

/**
 * @typedef {{ role: string, content: string | null, reasoning_content?: string, tool_calls?: ToolCall[],
 *   tool_call_id?: string }} Message
 * @typedef {{ id: string, type: string, function: { name: string, arguments: string } }} ToolCall
 * @typedef {{ index: number, id?: string, function: { name?: string, arguments?: string } }} CallDelta
 * @typedef {{ role?: string, content?: string | null, reasoning_content?: string | null,
 *   tool_calls?: CallDelta[] }} Delta
 * @typedef {{ token: string, logprob: number, bytes: number[] | null }} Candidate
 * @typedef {Candidate & { top_logprobs: Candidate[] }} TokenLogprob
 * @typedef {{ delta: Delta, finish_reason: string | null,
 *   logprobs?: { content: TokenLogprob[] } | null }} Choice
 * @typedef {{ prompt_tokens: number, completion_tokens: number,
 *   prompt_tokens_details?: { cached_tokens: number },
 *   completion_tokens_details?: { reasoning_tokens: number } }} Usage
 * @typedef {{ id: string, default_sampling?: Record<string, number> }} Model
 * @typedef {{ choices: Choice[], usage?: Usage | null, error?: { message: string } }} Chunk
 */

/** A failure to tell the reader. */
class Failure extends Error {
  /**
   * @param {string} message
   * @param {HTMLElement | null} field what the reader has to mend
   */
  constructor(message, field = null) {
    super(message);
    this.field = field;
  }
}

class UnauthorizedFailure extends Failure {}

/**
 * @param {string} path relative to this page, which may be served below a prefix
 * @param {string} token
 * @param {RequestInit} options
 */
async function call(path, token, options = {}) {
  /** @type {Record<string, string>} */
  const headers = { "content-type": "application/json" };
  if (token) headers.authorization = `Bearer ${token}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(explainLoss);
  if (!response.ok) throw await readFailure(response);
  return response;
}

/**
 * @param {unknown} error
 * @returns {never}
 */
function explainLoss(error) {
  if (isAbort(error)) throw error;
  throw new Failure("The connection to the service was lost.");
}

/** @param {unknown} error */
function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/** @param {Response} response */
async function readFailure(response) {
  const text = await response.text().catch(explainLoss);
  const message = `${response.status}: ${messageOf(text) || response.statusText}`;
  return response.status === 401 ? new UnauthorizedFailure(message) : new Failure(message);
}

/**
 * Return the message of an error's body, or the body itself if it is not the API's.
 * @param {string} text
 */
function messageOf(text) {
  try {
    return String(JSON.parse(text).error.message);
  } catch {
    return text.slice(0, 300);
  }
}

/** @param {string} token */
async function listModels(token) {
  const response = await call("v1/models", token);
  const list = /** @type {{ data: Model[] }} */ (await response.json());
  return list.data;
}

/**
 * @param {object} request
 * @param {string} token
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Chunk, void, void>}
 */
async function* streamChat(request, token, signal) {
  const options = { method: "POST", body: JSON.stringify(request), signal };
  const response = await call("v1/chat/completions", token, options);
  for await (const data of readEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = /** @type {Chunk} */ (JSON.parse(data));
    if (chunk.error) throw new Failure(chunk.error.message);
    yield chunk;
  }
  throw new Failure("The answer broke off.");
}

/**
 * Yield the data of server-sent events.
 * @param {Response} response
 */
async function* readEvents(response) {
  if (!response.body) return;
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(explainLoss);
    if (done) return;
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
  }
}
