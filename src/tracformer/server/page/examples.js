// Example texts, by kind of model.

const EXAMPLES = {
  text: [
    ["One blank", "Once upon a time, there was a little [[6]] who lived in a big house near the forest. Every morning she went out to play."],
    ["Two ends, no middle", "Tom and Mia wanted to bake a cake for their mom. [[16]] In the end, the cake was too big for the table, and they all laughed."],
    ["A length to be found", "Lily was sad because she had lost her [[1-6]]. She looked under the bed, and there it was!"],
    ["Work backwards", "[[20]] And that is why the old dog now sleeps in the kitchen every night."],
    ["Several at once", "The [[1]] was very [[2]]. He asked his friend, \"[[5]]?\" His friend smiled and said, \"Yes!\""],
  ],
  dna: [
    ["A gap in a read", "ATGGCCATTGTAATGGGCCGCTG[[8]]AAAGGGTGCCCGATAGCTAGC"],
    ["Two gaps", "TTGACAATTAATCATCGGC[[6]]TATAATGTGTGGAATTG[[6]]GAGCGGATAACAATTTCACACAGG"],
    ["Unknown length", "ATGACCATGATTACGGATTCACTG[[3-9]]GTCGTTTTACAACGTCGTGACTGG"],
  ],
  protein: [
    ["Redesign a loop", "MSKGEELFTGVVPILVELDGDVNGHKFSVS[[8]]DATYGKLTLKFICTTGKLPVPWPTLVTTF"],
    ["A missing residue", "MVLSPADKTNVKAAWGKVGAHAGEYGAEALER[[1]]FLSFPTTKTYFPHFDLSHGSAQVKGHGKK"],
    ["A linker of unknown length", "MKTAYIAKQRQISFVKSHFSRQ[[4-12]]LGLIEVQAPILSRVGDGTQDNLSGAEK"],
  ],
};

export const examplesFor = (kind) => EXAMPLES[kind].map(([title, text]) => ({ title, text }));
