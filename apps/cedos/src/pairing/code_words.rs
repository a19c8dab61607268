//! The words of transfer codes: short, concrete, easy to distinguish by ear and to spell.

/// A word for each value of a byte.
#[rustfmt::skip]
pub const CODE_WORDS: [&str; 256] = [
    "acorn", "album", "alder", "amber", "anchor", "anvil", "apple", "apron", "arrow", "aspen",
    "atlas", "badge", "bagel", "baker", "bamboo", "banjo", "barge", "basil", "basket", "beach",
    "beard", "beech", "berry", "birch", "biscuit", "blade", "blanket", "blaze", "bloom", "bottle",
    "brave", "bread", "brick", "bridge", "brook", "broom", "brush", "bucket", "bugle", "butter",
    "button", "cabin", "cable", "cactus", "camel", "camera", "candle", "canoe", "canvas", "carpet",
    "castle", "cedar", "cello", "chalk", "cherry", "chess", "cider", "cinema", "circle", "citrus",
    "clay", "cliff", "clock", "cloud", "clover", "cobalt", "coffee", "comet", "cookie", "copper",
    "coral", "cotton", "crane", "crayon", "cricket", "crown", "crystal", "curtain", "daisy",
    "dance", "denim", "desert", "diamond", "dinner", "dolphin", "domino", "donkey", "dragon",
    "drum", "eagle", "easel", "echo", "elbow", "elder", "emerald", "engine", "estate", "fabric",
    "falcon", "farmer", "feather", "fern", "fiddle", "field", "finch", "flame", "flute", "forest",
    "fossil", "fountain", "fox", "garden", "garlic", "gecko", "ginger", "glacier", "globe",
    "glove", "goat", "granite", "grape", "gravel", "guitar", "hammer", "hamster", "harbor",
    "hazel", "hedge", "helmet", "heron", "hockey", "honey", "horse", "hotel", "igloo", "island",
    "ivory", "jacket", "jaguar", "jasmine", "jewel", "jungle", "kayak", "kettle", "kitten",
    "koala", "ladder", "lagoon", "lantern", "laurel", "lemon", "lettuce", "lily", "linen", "lion",
    "lizard", "llama", "lobster", "locket", "lotus", "lunch", "magnet", "mango", "maple", "marble",
    "market", "meadow", "melon", "mirror", "monkey", "moon", "moss", "mountain", "museum",
    "mustard", "napkin", "nectar", "needle", "nickel", "noodle", "oak", "oasis", "ocean", "olive",
    "onion", "opera", "orange", "orchid", "otter", "oxygen", "paddle", "palace", "panda", "paper",
    "parrot", "peach", "pearl", "pencil", "pepper", "piano", "pillow", "pilot", "pine", "planet",
    "plum", "pocket", "poem", "pony", "poppy", "potato", "prairie", "pumpkin", "puzzle", "quartz",
    "quilt", "rabbit", "radio", "raven", "ribbon", "river", "robin", "rocket", "rose", "saddle",
    "sailor", "salmon", "sand", "satin", "shell", "silver", "sparrow", "spider", "spoon", "stable",
    "sugar", "summer", "sunset", "teapot", "temple", "thunder", "tiger", "tomato", "tower",
    "tulip", "tunnel", "turtle", "valley", "velvet", "violin", "wagon", "walnut", "water",
    "willow", "window", "winter", "zebra",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_is_there_once_and_is_plain() {
        assert!(CODE_WORDS.is_sorted_by(|one, next| one < next));
        let is_plain =
            |word: &&str| word.len() >= 3 && word.bytes().all(|b| b.is_ascii_lowercase());
        assert!(CODE_WORDS.iter().all(is_plain));
    }
}
