// What the scripts of JavaScript clients share: the server they talk to, and how their checks are run and reported.
import zlib from "node:zlib";

export const url = `${process.env.SACCADE_URL}/v1`;
export const key = process.env.SACCADE_KEY;
export const model = "tiny";
export const schema = {
  type: "object",
  properties: { a: { enum: [1, 2] }, b: { enum: [3, 4] } },
  required: ["a", "b"],
  additionalProperties: false,
};

function chunk(kind, data) {
  const body = Buffer.concat([Buffer.from(kind), data]);
  const framed = Buffer.alloc(body.length + 8);
  framed.writeUInt32BE(data.length, 0);
  body.copy(framed, 4);
  framed.writeUInt32BE(crc32(body), body.length + 4);
  return framed;
}

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return (crc ^ 0xffffffff) >>> 0;
}

const header = Buffer.from([0, 0, 0, 56, 0, 0, 0, 56, 8, 2, 0, 0, 0]);
const row = Buffer.concat([Buffer.from([0]), Buffer.alloc(56 * 3, 120)]);
export const png = Buffer.concat([
  Buffer.from("89504e470d0a1a0a", "hex"),
  chunk("IHDR", header),
  chunk("IDAT", zlib.deflateSync(Buffer.concat(Array(56).fill(row)))),
  chunk("IEND", Buffer.alloc(0)),
]);
export const image = `data:image/png;base64,${png.toString("base64")}`;

export function assert(condition, what = "it does not hold") {
  if (!condition) throw new Error(what);
}

export async function run(checks) {
  let failed = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`ok      ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED  ${name}\n        ${String(error.stack ?? error).slice(0, 1500)}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
