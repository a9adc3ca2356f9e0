/** @param {string} id */
function fieldById(id) {
  return /** @type {HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement} */ (byId(id));
}

/** Return the fields of a request that the settings ask for. Throws Failure. */
function readSettings() {
  checkFields();
  /** @type {Record<string, unknown>} */
  const fields = { ...readNumbers() };
  const model = fieldById("model").value;
  if (model) fields.model = model;
  const stop = fieldById("stop-strings").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  if (/** @type {HTMLInputElement} */ (byId("logprobs")).checked) {
    fields.logprobs = true;
    fields.top_logprobs = Number(fieldById("top-logprobs").value);
  }
  const schema = readJson("schema");
  const format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (schema !== undefined) fields.response_format = format;
  const tools = readJson("tools");
  if (tools !== undefined) Object.assign(fields, { tools, tool_choice: fieldById("tool-choice").value });
  const variables = readJson("variables");
  if (variables !== undefined) fields.chat_template_kwargs = variables;
  return fields;
}

function checkFields() {
  const inputs = /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll("#settings input"));
  for (const input of inputs) check(input);
}

/** @param {HTMLInputElement} input */
function check(input) {
  if (!input.checkValidity()) throw new Failure(`${labelOf(input)}: ${input.validationMessage}`, input);
}

/** Return the bearer token; empty: none. Throws Failure. */
function readToken() {
  const input = /** @type {HTMLInputElement} */ (byId("token"));
  input.value = input.value.trim();
  check(input);
  return input.value;
}

/** Return the values of the number fields that have one. */
function readNumbers() {
  const inputs = /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll("[data-field]"));
  const given = [...inputs].filter((input) => input.value);
  return Object.fromEntries(given.map((input) => [input.dataset.field, input.valueAsNumber]));
}

/** @param {string} id */
function readJson(id) {
  const field = fieldById(id);
  if (!field.value.trim()) return undefined;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    throw new Failure(`${labelOf(field)}: ${/** @type {Error} */ (error).message}`, field);
  }
}

/** @param {HTMLElement} field */
function labelOf(field) {
  return document.querySelector(`label[for="${field.id}"]`)?.textContent ?? "";
}

/** Fill empty fields with the sampling that the model's makers chose, once. @param {Model[]} models */
function showSampling(models) {
  const sampling = models.find((model) => model.default_sampling)?.default_sampling ?? {};
  const inputs = /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll("[data-field]"));
  const filled = [...inputs].filter((input) => (input.dataset.field ?? "") in sampling);
  const hint = byId("sampling-hint");
  if (!filled.length || !hint.hidden) return;
  for (const input of filled) input.value ||= String(sampling[input.dataset.field ?? ""]);
  hint.hidden = false;
}

function showsMarkdown() {
  return /** @type {HTMLInputElement} */ (byId("markdown")).checked;
}
