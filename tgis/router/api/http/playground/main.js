/** @type {{ messages: Message[], last: AnswerView | null, running: AbortController | null }} */
const chat = { messages: [], last: null, running: null };

async function send() {
  if (chat.running) return;
  showFailure(null);
  const text = fieldById("prompt").value;
  const written = text.trim() ? [{ role: "user", content: text }] : [];
  const added = [...(chat.last?.results ?? []), ...written];
  if (!added.length) return;
  const settings = tryToReadSettings();
  if (!settings) return;
  fieldById("prompt").value = "";
  const articles = added.map(showMessage);
  const view = new AnswerView();
  const isWhole = await answer(view, { ...settings, messages: withSystem([...chat.messages, ...added]) });
  if (isWhole || !view.isEmpty) keep(added, view);
  else undo([...articles, view.article], text);
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
  chat.last = view;
}

/**
 * Take back what was sent without an answer.
 * @param {HTMLElement[]} articles
 * @param {string} text
 */
function undo(articles, text) {
  for (const article of articles) article.remove();
  fieldById("prompt").value ||= text;
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
  /** @type {HTMLButtonElement} */ (byId("send")).disabled = Boolean(running);
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
  Object.assign(chat, { messages: [], last: null });
  byId("transcript").replaceChildren();
  showFailure(null);
  byId("prompt").focus();
}

async function loadModels() {
  showFailure(null);
  const model = fieldById("model");
  try {
    const names = await listModels(readToken());
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
  void send();
}

function begin() {
  byId("send").addEventListener("click", () => void send());
  byId("stop").addEventListener("click", () => chat.running?.abort());
  byId("new-chat").addEventListener("click", beginNewChat);
  byId("reload").addEventListener("click", () => void loadModels());
  byId("token").addEventListener("change", () => void loadModels());
  byId("prompt").addEventListener("keydown", sendOnEnter);
  byId("transcript").addEventListener("scroll", placeAlternatives);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideAlternatives());
  if (window.matchMedia("(max-width: 48rem)").matches) byId("settings").removeAttribute("open");
  void loadModels();
}

begin();
