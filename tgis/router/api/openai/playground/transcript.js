/**
 * @param {string} tag
 * @param {string} className
 * @param {string} text
 */
function make(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** @param {string} id */
function byId(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/**
 * @param {string} role
 * @param {string} title
 */
function addArticle(role, title) {
  const article = make("article", role);
  article.append(make("h2", "", title));
  byId("transcript").append(article);
  return article;
}

/** @param {Message} message */
function showMessage(message) {
  const article = addArticle(message.role, message.role === "tool" ? "Result" : "You");
  article.append(make("p", "text", message.content ?? ""));
  scrollToEnd();
  return article;
}

/**
 * Change the transcript, and keep its end in sight, unless the reader has scrolled up.
 * @param {() => void} change
 */
function follow(change) {
  const box = byId("transcript");
  const wasAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (wasAtEnd) scrollToEnd();
}

function scrollToEnd() {
  byId("transcript").scrollTop = byId("transcript").scrollHeight;
}

/**
 * @param {HTMLElement} box
 * @param {string} title
 * @param {boolean} isOpen
 */
function addFold(box, title, isOpen) {
  const fold = /** @type {HTMLDetailsElement} */ (make("details"));
  fold.open = isOpen;
  fold.append(make("summary", "", title));
  box.append(fold);
  return fold;
}

/** @param {string} text */
function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** A model's answer while it comes, and what the next request has to repeat of it. */
class AnswerView {
  /** @param {boolean} hasForm true if the answer follows a schema and is no Markdown */
  constructor(hasForm) {
    this.hasForm = hasForm;
    this.article = addArticle("assistant", "Model");
    this.article.setAttribute("aria-busy", "true");
    /** Parts in the order in which they are read, whatever comes first. */
    this.parts = {
      reasoning: make("div", "reasoning"),
      content: make("div", "content"),
      calls: make("div", "calls"),
      tokens: make("div"),
    };
    this.article.append(...Object.values(this.parts));
    /** @type {Map<string, TextView>} */
    this.texts = new Map();
    /** @type {Map<number, { call: ToolCall, shown: Text, result: HTMLTextAreaElement }>} */
    this.calls = new Map();
    /** @type {TokenStrip | null} */
    this.tokens = null;
    this.finishReason = "";
  }

  /** @param {Choice} choice */
  add(choice) {
    follow(() => this.addDelta(choice.delta, choice.logprobs?.content ?? []));
    this.finishReason = choice.finish_reason ?? this.finishReason;
  }

  /**
   * @param {Delta} delta
   * @param {TokenLogprob[]} details
   */
  addDelta(delta, details) {
    const { reasoning_content: reasoning, content, tool_calls: calls } = delta;
    if (reasoning) this.textView("reasoning").append(reasoning);
    if (content) this.textView("content").append(content);
    for (const call of calls ?? []) this.addCall(call);
    for (const detail of details) this.tokenStrip().add(detail);
  }

  /**
   * Return the text that deltas of a kind are added to.
   * @param {"reasoning" | "content"} kind
   */
  textView(kind) {
    const known = this.texts.get(kind);
    if (known) return known;
    const box = kind === "content" ? this.parts.content : addFold(this.parts.reasoning, "Reasoning", false);
    const view = new TextView(box, this.hasForm || !showsMarkdown());
    this.texts.set(kind, view);
    return view;
  }

  /** Draw the texts as the reader wants them now. */
  redraw() {
    for (const view of this.texts.values()) view.show(this.hasForm || !showsMarkdown());
  }

  /** @param {CallDelta} delta */
  addCall(delta) {
    const entry = this.calls.get(delta.index) ?? this.beginCall(delta);
    const more = delta.function.arguments ?? "";
    entry.call.function.arguments += more;
    entry.shown.appendData(more);
  }

  /** @param {CallDelta} delta */
  beginCall(delta) {
    const name = delta.function.name ?? "";
    const box = addFold(this.parts.calls, `Call of ${name}`, true);
    const shown = document.createTextNode("");
    const pre = make("pre", "arguments");
    pre.append(shown);
    const result = /** @type {HTMLTextAreaElement} */ (make("textarea"));
    const label = make("label", "", "Result, sent with the next message");
    label.append(result);
    box.append(pre, label);
    const call = { id: delta.id ?? "", type: "function", function: { name, arguments: "" } };
    const entry = { call, shown, result };
    this.calls.set(delta.index, entry);
    return entry;
  }

  tokenStrip() {
    this.tokens ??= new TokenStrip(addFold(this.parts.tokens, "Token probabilities", true));
    return this.tokens;
  }

  /** @param {string} stats */
  end(stats) {
    this.article.setAttribute("aria-busy", "false");
    for (const { call, result } of this.calls.values()) result.disabled = !isJson(call.function.arguments);
    follow(() => this.redraw());
    follow(() => this.article.append(make("p", "stats", stats)));
  }

  get isEmpty() {
    return !this.texts.size && !this.calls.size;
  }

  /** @returns {Message} */
  get message() {
    /** @type {Message} */
    const message = { role: "assistant", content: this.texts.get("content")?.data ?? null };
    const reasoning = this.texts.get("reasoning")?.data;
    if (reasoning) message.reasoning_content = reasoning;
    const calls = this.wholeCalls.map((entry) => entry.call);
    if (calls.length) message.tool_calls = calls;
    return message;
  }

  /** Calls whose arguments were not cut; the service takes no others back. */
  get wholeCalls() {
    return [...this.calls.values()].filter((entry) => isJson(entry.call.function.arguments));
  }

  /** Messages that tell the model what its calls gave. */
  get results() {
    return this.wholeCalls.map(({ call, result }) => {
      return { role: "tool", tool_call_id: call.id, content: result.value };
    });
  }

  closeResults() {
    for (const { result } of this.calls.values()) result.readOnly = true;
  }
}
