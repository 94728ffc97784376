"""English function words: the closed classes, listed by the grammar's own divisions.

Source of the division: R. Huddleston and G. K. Pullum, *The Cambridge Grammar of the English
Language* (2002): determinatives (ch. 5), pronouns (ch. 5), auxiliaries (ch. 3), prepositions
(ch. 7), coordinators (ch. 15), subordinators (ch. 11); interrogative and relative words (ch. 10, 12).
The members were listed for this project from those classes. Only one-word forms in modern use are
in; words that are as often lexical (*round*, *past*, *like* as a verb, *use*) stand where the
function reading is the common one in prose.
"""

DETERMINATIVES = ["a", "an", "the", "this", "that", "these", "those", "some", "any", "no", "every", "each", "either", "neither", "both", "all", "half", "enough", "much", "many", "more", "most", "few", "fewer", "fewest", "little", "less", "least", "several", "another", "such", "what", "which", "whatever", "whichever"]

PRONOUNS = ["i", "me", "my", "mine", "myself", "you", "your", "yours", "yourself", "yourselves", "he", "him", "his", "himself", "she", "her", "hers", "herself", "it", "its", "itself", "we", "us", "our", "ours", "ourselves", "they", "them", "their", "theirs", "themselves", "one", "oneself", "who", "whom", "whose", "whoever", "whomever", "someone", "somebody", "something", "anyone", "anybody", "anything", "everyone", "everybody", "everything", "nobody", "nothing", "none", "there"]

AUXILIARIES = ["be", "am", "is", "are", "was", "were", "been", "being", "have", "has", "had", "having", "do", "does", "did", "doing", "done", "can", "could", "may", "might", "must", "shall", "should", "will", "would", "ought", "cannot"]

PREPOSITIONS = ["aboard", "about", "above", "across", "after", "against", "along", "alongside", "amid", "among", "amongst", "around", "as", "at", "before", "behind", "below", "beneath", "beside", "besides", "between", "beyond", "by", "despite", "down", "during", "except", "for", "from", "in", "inside", "into", "like", "near", "of", "off", "on", "onto", "opposite", "out", "outside", "over", "past", "per", "regarding", "round", "since", "than", "through", "throughout", "till", "to", "toward", "towards", "under", "underneath", "unlike", "until", "up", "upon", "versus", "via", "with", "within", "without"]

COORDINATORS = ["and", "or", "but", "nor", "yet", "so", "plus"]

SUBORDINATORS = ["if", "whether", "because", "although", "though", "unless", "while", "whilst", "whereas", "lest", "once", "when", "whenever", "where", "wherever", "why", "how", "however"]

PARTICLES = ["not", "n't", "'s", "'re", "'ve", "'ll", "'d", "'m", "'t"]
"""Negation and the clitics, as tokenizers split them off."""

FUNCTION_WORDS = frozenset(
    DETERMINATIVES
    + PRONOUNS
    + AUXILIARIES
    + PREPOSITIONS
    + COORDINATORS
    + SUBORDINATORS
    + PARTICLES
)
