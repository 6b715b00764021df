// Server-sent events from a fetch body. EventSource can neither POST nor send a key.

/** The data of each event of a stream of bytes. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data !== null) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The data lines of one event, or null for a comment. */
function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null;
}
