// Commands of TeX that stand for one symbol, by the way it is set.

const words = (text) => text.trim().split(/\s+/);
const table = (text) => Object.fromEntries(words(text).map((pair) => pair.split("=")));

/** Letters, set in italics. */
export const LETTERS = table(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ varkappa=ϰ
  lambda=λ mu=μ nu=ν xi=ξ omicron=ο pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ
  chi=χ psi=ψ omega=ω digamma=ϝ ell=ℓ imath=ı jmath=ȷ
`);

/** Symbols, set upright. */
export const UPRIGHT = table(`
  Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇
  emptyset=∅ varnothing=∅ hbar=ℏ hslash=ℏ Re=ℜ Im=ℑ aleph=ℵ beth=ℶ wp=℘ forall=∀ exists=∃ nexists=∄ top=⊤ bot=⊥
  angle=∠ measuredangle=∡ triangle=△ square=□ Box=□ blacksquare=■ diamond=⋄ Diamond=◇ lozenge=◊ bigstar=★ clubsuit=♣
  diamondsuit=♢ heartsuit=♡ spadesuit=♠ sharp=♯ flat=♭ natural=♮ prime=′ backprime=‵ degree=° checkmark=✓ dagger=†
  ddagger=‡ S=§ P=¶ copyright=© pounds=£ euro=€ yen=¥ ldots=… dots=… dotsc=… dotso=… cdots=⋯ dotsb=⋯ dotsm=⋯ dotsi=⋯
  vdots=⋮ ddots=⋱ complement=∁ eth=ð mho=℧ Finv=Ⅎ %=% $=$ #=# &=& _=_ AA=Å aa=å
`);

/** Operators, relations, arrows and punctuation. */
export const OPERATORS = table(`
  pm=± mp=∓ times=× div=÷ cdot=⋅ centerdot=⋅ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ oslash=⊘ odot=⊙
  dotplus=∔ wr=≀ amalg=⨿ cap=∩ cup=∪ uplus=⊎ sqcap=⊓ sqcup=⊔ vee=∨ lor=∨ wedge=∧ land=∧ neg=¬ lnot=¬ setminus=∖
  smallsetminus=∖ barwedge=⊼ veebar=⊻ bigcirc=◯ lhd=⊲ rhd=⊳ unlhd=⊴ unrhd=⊵ ltimes=⋉ rtimes=⋊ boxplus=⊞ boxminus=⊟
  boxtimes=⊠ boxdot=⊡ intercal=⊺ leq=≤ le=≤ geq=≥ ge=≥ leqslant=⩽ geqslant=⩾ lt=< gt=> neq=≠ ne=≠ equiv=≡ approx=≈
  approxeq=≊ sim=∼ simeq=≃ cong=≅ propto=∝ varpropto=∝ doteq=≐ ll=≪ gg=≫ lll=⋘ ggg=⋙ prec=≺ succ=≻ preceq=⪯ succeq=⪰
  lesssim=≲ gtrsim=≳ asymp=≍ bowtie=⋈ models=⊨ vdash=⊢ dashv=⊣ vDash=⊨ Vdash=⊩ triangleq=≜ coloneqq=≔ coloneq=≔
  eqqcolon=≕ colon=: in=∈ notin=∉ ni=∋ owns=∋ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ subsetneq=⊊ supsetneq=⊋
  nsubseteq=⊈ nsupseteq=⊉ sqsubset=⊏ sqsupset=⊐ sqsubseteq=⊑ sqsupseteq=⊒ mid=∣ nmid=∤ parallel=∥ nparallel=∦ perp=⟂
  smile=⌣ frown=⌢ because=∵ therefore=∴ nless=≮ ngtr=≯ nleq=≰ ngeq=≱ ncong=≇ nsim=≁ to=→ rightarrow=→ gets=←
  leftarrow=← leftrightarrow=↔ uparrow=↑ downarrow=↓ updownarrow=↕ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔
  Uparrow=⇑ Downarrow=⇓ Updownarrow=⇕ implies=⟹ impliedby=⟸ iff=⟺ longrightarrow=⟶ longleftarrow=⟵
  longleftrightarrow=⟷ Longrightarrow=⟹ Longleftarrow=⟸ Longleftrightarrow=⟺ mapsto=↦ longmapsto=⟼ hookrightarrow=↪
  hookleftarrow=↩ rightharpoonup=⇀ rightharpoondown=⇁ leftharpoonup=↼ leftharpoondown=↽ rightleftharpoons=⇌
  leftrightharpoons=⇋ nearrow=↗ searrow=↘ swarrow=↙ nwarrow=↖ rightsquigarrow=⇝ leadsto=⇝ nrightarrow=↛ nleftarrow=↚
  twoheadrightarrow=↠ rightarrowtail=↣ upharpoonright=↾ restriction=↾ circlearrowleft=↺ circlearrowright=↻
`);

/** Large operators, with limits above and below in displays. */
export const SUMS = table(`
  sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigvee=⋁ bigwedge=⋀ bigoplus=⨁ bigotimes=⨂ bigodot=⨀ biguplus=⨄ bigsqcup=⨆
`);

/** Integrals, with limits to their right. */
export const INTEGRALS = table("int=∫ iint=∬ iiint=∭ iiiint=⨌ oint=∮ oiint=∯ oiiint=∰ smallint=∫");

/** Functions, set upright. */
export const FUNCTIONS = new Set(
  words(`
  sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arg deg dim exp hom ker lg ln log
`),
);

/** Functions whose limits stand below them. */
export const LIMITS = {
  ...Object.fromEntries(words("lim max min sup inf det gcd Pr argmax argmin").map((name) => [name, name])),
  limsup: "lim sup",
  liminf: "lim inf",
};

/** Marks above a symbol; those that stretch over several. */
export const ACCENTS = table(
  "hat=^ tilde=~ bar=¯ vec=→ dot=˙ ddot=¨ dddot=⃛ check=ˇ breve=˘ acute=´ grave=` mathring=˚",
);
export const WIDE_ACCENTS = table(
  "widehat=^ widetilde=~ overrightarrow=→ overleftarrow=← overleftrightarrow=↔ overbrace=⏞ overparen=⏜",
);
export const UNDER_ACCENTS = table("underbrace=⏟ underparen=⏝ underrightarrow=→ underleftarrow=←");
export const LONG_ARROWS = table("xrightarrow=→ xleftarrow=← xleftrightarrow=↔ xRightarrow=⇒ xLeftarrow=⇐ xmapsto=↦");

/** Delimiters, as `\left` and `\big` take them. */
export const DELIMITERS = {
  "(": "(",
  ")": ")",
  "[": "[",
  "]": "]",
  "|": "|",
  "/": "/",
  ".": "",
  "<": "⟨",
  ">": "⟩",
  ...table(`
  \\{={ \\}=} \\|=‖ \\lbrace={ \\rbrace=} \\lbrack=[ \\rbrack=] \\langle=⟨ \\rangle=⟩ \\lvert=| \\rvert=| \\vert=|
  \\lVert=‖ \\rVert=‖ \\Vert=‖ \\lfloor=⌊ \\rfloor=⌋ \\lceil=⌈ \\rceil=⌉ \\lgroup=⟮ \\rgroup=⟯ \\backslash=\\
  \\uparrow=↑ \\downarrow=↓ \\Uparrow=⇑ \\Downarrow=⇓ \\llbracket=⟦ \\rrbracket=⟧ \\ulcorner=⌜ \\urcorner=⌝
  \\llcorner=⌞ \\lrcorner=⌟
  `),
};
export const OPENING = new Set("( [ { ⟨ ⌊ ⌈ ⟮ ⟦ ⌜ ⌞".split(" "));
export const CLOSING = new Set(") ] } ⟩ ⌋ ⌉ ⟯ ⟧ ⌝ ⌟".split(" "));

/** Widths of spaces in em. */
export const SPACES = {
  ",": 0.167,
  ":": 0.222,
  ">": 0.222,
  ";": 0.278,
  "!": -0.167,
  " ": 0.25,
  quad: 1,
  qquad: 2,
  thinspace: 0.167,
  medspace: 0.222,
  thickspace: 0.278,
  negthinspace: -0.167,
  enspace: 0.5,
  "~": 0.25,
};

/** Sizes of `\big` and related commands in em; each also exists with l, r and m. */
export const SIZES = { big: 1.2, Big: 1.8, bigg: 2.4, Bigg: 3 };

// ------------------------------------------------------------------ alphabets

/** Where the letters A to Z, a to z and 0 to 9 of an alphabet begin; letters that Unicode has elsewhere. */
const ALPHABETS = {
  bold: { upper: 0x1d400, lower: 0x1d41a, digit: 0x1d7ce, greek: 0x1d6c2, greekUpper: 0x1d6a8 },
  "bold-italic": { upper: 0x1d468, lower: 0x1d482, digit: 0x1d7ce, greek: 0x1d736, greekUpper: 0x1d71c },
  italic: { upper: 0x1d434, lower: 0x1d44e, other: { h: "ℎ" } },
  script: { upper: 0x1d49c, lower: 0x1d4b6, other: table("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ") },
  fraktur: { upper: 0x1d504, lower: 0x1d51e, other: table("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ") },
  double: { upper: 0x1d538, lower: 0x1d552, digit: 0x1d7d8, other: table("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ") },
  sans: { upper: 0x1d5a0, lower: 0x1d5ba, digit: 0x1d7e2 },
  mono: { upper: 0x1d670, lower: 0x1d68a, digit: 0x1d7f6 },
};

/** Commands that choose an alphabet. */
export const FONTS = {
  mathbf: "bold",
  bold: "bold",
  boldsymbol: "bold-italic",
  bm: "bold-italic",
  mathit: "italic",
  mathcal: "script",
  mathscr: "script",
  mathfrak: "fraktur",
  mathbb: "double",
  mathsf: "sans",
  mathtt: "mono",
  mathrm: "normal",
  mathnormal: null,
};

/** A letter or digit in an alphabet; what the alphabet does not have stays as it is. */
export function inAlphabet(character, alphabet) {
  const { upper, lower, digit, greek, greekUpper, other } = ALPHABETS[alphabet] ?? {};
  if (other?.[character]) return other[character];
  const shifted = (first, start) => String.fromCodePoint(start + character.codePointAt(0) - first.codePointAt(0));
  if (upper && /^[A-Z]$/.test(character)) return shifted("A", upper);
  if (lower && /^[a-z]$/.test(character)) return shifted("a", lower);
  if (digit && /^[0-9]$/.test(character)) return shifted("0", digit);
  if (greek && /^[α-ω]$/.test(character)) return shifted("α", greek);
  if (greekUpper && /^[Α-Ω]$/.test(character)) return shifted("Α", greekUpper);
  return character;
}
