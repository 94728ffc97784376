"""English function words: the closed classes, listed by the grammar's own divisions.

Source of the division: R. Huddleston and G. K. Pullum, *The Cambridge Grammar of the English
Language* (2002): determinatives and pronouns (ch. 5), auxiliaries (ch. 3), prepositions (ch. 7),
coordinators (ch. 15), subordinators (ch. 11), interrogative and relative words (ch. 10 and 12).
The members were listed for this project from those classes. Only one-word forms in modern use are
in; words that are as often lexical (*like*, *past*, *round*) stand where the function reading is
the common one in prose. Clitics are spelled as tokenizers split them off.
"""

CLASSES = """
determinative: a an the this that these those some any no every each either neither both all half
determinative: enough much many more most few fewer fewest little less least several another such
determinative: what which whatever whichever
pronoun: i me my mine myself you your yours yourself yourselves he him his himself she her hers
pronoun: herself it its itself we us our ours ourselves they them their theirs themselves one oneself
pronoun: who whom whose whoever whomever someone somebody something anyone anybody anything everyone
pronoun: everybody everything nobody nothing none there
auxiliary: be am is are was were been being have has had having do does did doing done can could may
auxiliary: might must shall should will would ought cannot
preposition: aboard about above across after against along alongside amid among amongst around as at
preposition: before behind below beneath beside besides between beyond by despite down during except
preposition: for from in inside into like near of off on onto opposite out outside over past per
preposition: regarding round since than through throughout till to toward towards under underneath
preposition: unlike until up upon versus via with within without
coordinator: and or but nor yet so plus
subordinator: if whether because although though unless while whilst whereas lest once when whenever
subordinator: where wherever why how however
negation and clitic: not n't 's 're 've 'll 'd 'm 't
"""

FUNCTION_WORDS = frozenset(
    word for line in CLASSES.strip().splitlines() for word in line.partition(": ")[2].split()
)
