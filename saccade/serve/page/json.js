// JSON for people: indented without being parsed, so that it is readable while it streams and no digit of a number
// changes.

/** The text with line breaks and indentation between its tokens. */
export function indentJson(text) {
  const tokens = text.match(/"(?:[^"\\]|\\.)*"?|[{}[\],:]|[^\s{}[\],:"]+/g) ?? [];
  let [out, depth] = ["", 0];
  const newLine = () => `\n${"  ".repeat(depth)}`;
  for (const [at, token] of tokens.entries()) {
    const isEmpty = (token === "}" || token === "]") && tokens[at - 1] === { "}": "{", "]": "[" }[token];
    if (token === "}" || token === "]") {
      depth = Math.max(0, depth - 1);
      out += isEmpty ? token : newLine() + token;
    } else if (token === "{" || token === "[") {
      depth = Math.min(depth + 1, 64);
      const next = tokens[at + 1];
      out += next === "}" || next === "]" ? token : token + newLine();
    } else if (token === ",") out += token + newLine();
    else out += token === ":" ? ": " : token;
  }
  return out;
}
