// Time to first token and tokens per second of one answer. While it streams, an event counts as one token.

const LEAST_EVENTS = 8; // fewer arrive in bursts, which say nothing about the rate

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

export class Figures {
  usage = null;
  #started = performance.now();
  #first = null;
  #last = null;
  #events = 0;

  addText() {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#events += 1;
  }

  line() {
    if (this.#first === null) return "";
    const tokens = this.usage?.completion_tokens ?? this.#events;
    const seconds = (this.#last - this.#first) / 1000;
    const parts = [`first token ${duration(this.#first - this.#started)}`, `${tokens} tokens`];
    if (this.#events >= LEAST_EVENTS && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    return parts.join(" · ");
  }
}
