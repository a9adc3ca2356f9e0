/** Times of an answer, and the counts that the service tells at its end. */
class Meter {
  constructor() {
    this.begunAt = performance.now();
    this.firstAt = 0;
    this.lastAt = 0;
    /** @type {Usage | null} */
    this.usage = null;
  }

  /** @param {Chunk} chunk */
  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    if (!choice || choice.delta.role) return;
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
  }

  /** @param {string} reason why the answer ended */
  describe(reason) {
    const parts = [...this.describeCounts(), ...this.describeTimes(), reason && `end: ${reason}`];
    return parts.filter(Boolean).join(" · ");
  }

  describeCounts() {
    const usage = this.usage;
    if (!usage) return [];
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const reasoning = usage.completion_tokens_details?.reasoning_tokens;
    return [
      `prompt: ${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`,
      `answer: ${usage.completion_tokens} tokens${reasoning ? `, ${reasoning} of reasoning` : ""}`,
    ];
  }

  describeTimes() {
    if (!this.firstAt) return [];
    const numAfterFirst = (this.usage?.completion_tokens ?? 0) - 1;
    const span = (this.lastAt - this.firstAt) / 1000;
    const speed = numAfterFirst > 0 && span > 0 ? `${(numAfterFirst / span).toFixed(1)} tokens/s` : "";
    return [`first token: ${((this.firstAt - this.begunAt) / 1000).toFixed(2)} s`, speed];
  }
}
