// Numbers as people read them: counts, shares, times, sizes.

export const count = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(1));
export const whole = (value) => Math.round(value).toLocaleString("en");
export const compact = (value) =>
  value >= 1000 ? `${(value / 1000).toFixed(1)}k` : value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1);
export const percent = (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
export const time = (seconds) =>
  seconds === 0
    ? "0"
    : seconds < 1
      ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`
      : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
export const bytes = (value) =>
  value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : value === 0 ? "0" : `${(value / 2 ** 20).toFixed(0)} MiB`;
