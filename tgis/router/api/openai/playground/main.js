/** @typedef {{ text: string, article: HTMLElement }} Waiting a message that is sent after the running answer */
/**
 * @type {{ messages: Message[], last: AnswerView | null, running: AbortController | null,
 *   answers: AnswerView[], waiting: Waiting[] }}
 */
const chat = { messages: [], last: null, running: null, answers: [], waiting: [] };

/** Send what is written, or let it wait for the end of the running answer. */
async function submit() {
  const prompt = fieldById("prompt");
  const text = prompt.value;
  prompt.value = "";
  if (chat.running) {
    if (text.trim()) wait(text);
    return;
  }
  let isWhole = await send(text);
  while (isWhole && chat.waiting.length) isWhole = await send(takeWaiting());
  giveBack();
}

/** @param {string} text */
function wait(text) {
  const article = showMessage({ role: "user", content: text });
  article.classList.add("waiting");
  article.querySelector("h2")?.append(", after this answer");
  chat.waiting.push({ text, article });
}

/** Return the text of the first message that waits. */
function takeWaiting() {
  const first = chat.waiting.shift();
  first?.article.remove();
  return first?.text ?? "";
}

/** Put messages that wait for an answer that did not come to its end back where they were written. */
function giveBack() {
  const texts = chat.waiting.splice(0).map(({ text, article }) => {
    article.remove();
    return text;
  });
  const prompt = fieldById("prompt");
  prompt.value = [...texts, prompt.value].filter(Boolean).join("\n");
}

/**
 * Send a message, with results of calls, and show the answer. Return whether it came to its end.
 * @param {string} text
 */
async function send(text) {
  showFailure(null);
  const written = text.trim() ? [{ role: "user", content: text }] : [];
  const added = [...(chat.last?.results ?? []), ...written];
  if (!added.length) return true;
  const settings = tryToReadSettings();
  if (!settings) {
    undo([], text);
    return false;
  }
  const articles = added.map(showMessage);
  for (const { article } of chat.waiting) byId("transcript").append(article);
  const view = new AnswerView("response_format" in settings);
  const isWhole = await answer(view, { ...settings, messages: withSystem([...chat.messages, ...added]) });
  if (isWhole || !view.isEmpty) keep(added, view);
  else undo([...articles, view.article], text);
  return isWhole;
}

/** Return the settings' fields; null if one of them is wrong, which the reader is told. */
function tryToReadSettings() {
  try {
    return readSettings();
  } catch (error) {
    showFailure(error);
    return null;
  }
}

/**
 * Show an answer as it comes. Return whether it came to its end.
 * @param {AnswerView} view
 * @param {object} fields
 */
async function answer(view, fields) {
  const meter = new Meter();
  const running = new AbortController();
  setRunning(running);
  try {
    const request = { ...fields, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of streamChat(request, readToken(), running.signal)) {
      meter.add(chunk);
      if (chunk.choices.length) view.add(chunk.choices[0]);
    }
    setStatus("The answer is complete.");
    return true;
  } catch (error) {
    if (isAbort(error)) setStatus("Stopped.");
    else showFailure(error);
    return false;
  } finally {
    view.end(meter.describe(running.signal.aborted ? "stopped" : view.finishReason));
    setRunning(null);
  }
}

/**
 * @param {Message[]} added
 * @param {AnswerView} view
 */
function keep(added, view) {
  chat.last?.closeResults();
  chat.messages.push(...added, view.message);
  chat.answers.push(view);
  chat.last = view;
}

/**
 * Take back what was not sent, or has no answer.
 * @param {HTMLElement[]} articles
 * @param {string} text
 */
function undo(articles, text) {
  for (const article of articles) article.remove();
  chat.waiting.unshift({ text, article: make("article") });
}

/** @param {Message[]} messages */
function withSystem(messages) {
  const system = fieldById("system").value;
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

/** @param {AbortController | null} running */
function setRunning(running) {
  chat.running = running;
  const hadFocus = document.activeElement === byId("stop");
  byId("send").textContent = running ? "Send after this answer" : "Send";
  /** @type {HTMLButtonElement} */ (byId("stop")).disabled = !running;
  /** @type {HTMLButtonElement} */ (byId("new-chat")).disabled = Boolean(running);
  if (running) setStatus("The model answers.");
  else if (hadFocus) byId("prompt").focus();
}

/** @param {string} text */
function setStatus(text) {
  byId("status").textContent = text;
}

/** @param {unknown} error null: none */
function showFailure(error) {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  byId("error").textContent = error instanceof Error ? error.message : "";
  setStatus("");
  const isOfToken = error instanceof UnauthorizedFailure;
  const field = isOfToken ? byId("token") : error instanceof Failure && error.field;
  if (!field) return;
  /** @type {HTMLDetailsElement} */ (byId("settings")).open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

function beginNewChat() {
  Object.assign(chat, { messages: [], last: null, answers: [] });
  byId("transcript").replaceChildren();
  showFailure(null);
  byId("prompt").focus();
}

async function loadModels() {
  showFailure(null);
  const model = fieldById("model");
  try {
    const models = await listModels(readToken());
    showSampling(models);
    const names = models.map(({ id }) => id);
    const chosen = names.includes(model.value) ? model.value : names[0];
    model.replaceChildren(...names.map((name) => make("option", "", name)));
    model.value = chosen;
    setStatus("Ready.");
  } catch (error) {
    const isTokenMissing = error instanceof UnauthorizedFailure && !fieldById("token").value;
    if (isTokenMissing) setStatus("The service needs a bearer token.");
    else showFailure(error);
  }
}

/** @param {KeyboardEvent} event */
function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  void submit();
}

function begin() {
  byId("send").addEventListener("click", () => void submit());
  byId("stop").addEventListener("click", () => chat.running?.abort());
  byId("new-chat").addEventListener("click", beginNewChat);
  byId("reload").addEventListener("click", () => void loadModels());
  byId("token").addEventListener("change", () => void loadModels());
  byId("markdown").addEventListener("change", () => {
    for (const view of chat.answers) view.redraw();
  });
  byId("prompt").addEventListener("keydown", sendOnEnter);
  byId("transcript").addEventListener("scroll", placeAlternatives);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideAlternatives());
  if (window.matchMedia("(max-width: 48rem)").matches) byId("settings").removeAttribute("open");
  void loadModels();
}

begin();
