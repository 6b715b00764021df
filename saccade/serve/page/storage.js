// Values that last as long as the tab: sessionStorage, or memory where the browser denies it.

const memory = new Map();

/** The stored text, or null. */
export function recall(name) {
  try {
    return sessionStorage.getItem(name) ?? memory.get(name) ?? null;
  } catch {
    return memory.get(name) ?? null;
  }
}

/** Store a text; null removes it. */
export function remember(name, value) {
  memory.delete(name);
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, value);
  } catch {
    if (value !== null) memory.set(name, value);
  }
}
