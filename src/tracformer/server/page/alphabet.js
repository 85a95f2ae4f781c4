// Models of characters: which kind of sequence a model writes (text, DNA, protein), and the colour class of each character.

const CLASSES = {
  dna: { A: "a", C: "c", G: "g", T: "t", U: "t" },
  protein: {
    ...of("hydrophobic", "AVILM"), ...of("aromatic", "FWY"), ...of("polar", "STNQ"), ...of("positive", "KRH"), ...of("negative", "DE"), ...of("special", "CGP"),
  },
};

export const LEGENDS = {
  dna: [["a", "A"], ["c", "C"], ["g", "G"], ["t", "T"]],
  protein: [["hydrophobic", "hydrophobic"], ["aromatic", "aromatic"], ["polar", "polar"], ["positive", "positive"], ["negative", "negative"], ["special", "C, G, P"]],
};

function of(name, letters) {
  return Object.fromEntries([...letters].map((letter) => [letter, name]));
}

// Return "text", "dna" or "protein" for a model.
export function kindOf(model) {
  if (model?.tokenizer !== "characters" || !model.alphabet) return "text";
  const letters = new Set(model.alphabet.replace(/[^A-Za-z]/g, ""));
  const has = (wanted) => [...wanted].every((letter) => letters.has(letter));
  if (has("acgt") && letters.size <= 8) return "dna";
  if (has("ACG") && (letters.has("T") || letters.has("U")) && letters.size <= 16) return "dna";
  return has("ACDEFGHIKLMNPQRSTVWY") && !letters.has("a") ? "protein" : "text";
}

export const classOf = (kind, letter) => CLASSES[kind]?.[letter.toUpperCase()] ?? "other";

// Return pasted FASTA text as a plain sequence: without headers, and without white space and lower case that the model's alphabet lacks.
export function cleaned(text, alphabet) {
  const kept = text.replace(/^>.*$/gm, "").replace(/\s+/g, (space) => (alphabet.includes(space[0]) ? space : ""));
  return /[a-z]/.test(alphabet) ? kept : kept.toUpperCase();
}
