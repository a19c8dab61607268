//! A code such as `4271-tiger-lemon-river`: a mailbox at the proxy, and a password of 24 bits.
//!
//! So few bits suffice because each use of a code allows one guess ([`super::key_exchange`]), and its mailbox
//! works once.

use std::fmt;
use std::str::FromStr;

use super::code_words::CODE_WORDS;

/// The number of words of a code. Fewer: easier to say, and easier to guess.
const WORDS: usize = 3;

/// The largest number of a mailbox.
const NUMBER_MAX: u32 = 99_999_999;

/// The code of one transfer: the number of a mailbox, and words that only two people know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferCode {
    /// The number of the mailbox.
    pub number: u32,
    words: [u8; WORDS],
}

impl TransferCode {
    /// A code for a mailbox, with words by these random bytes.
    pub fn new(number: u32, words: [u8; WORDS]) -> TransferCode {
        TransferCode { number, words }
    }

    /// The password that both ends prove to each other.
    pub fn password(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for TransferCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number)?;
        for word in self.words {
            write!(f, "-{}", CODE_WORDS[usize::from(word)])?;
        }
        Ok(())
    }
}

impl FromStr for TransferCode {
    type Err = String;

    fn from_str(text: &str) -> Result<TransferCode, String> {
        let shape = || {
            format!(
                "`{text}` is not a code: it is a number and {WORDS} words, such as {}",
                TransferCode::new(4271, [200, 100, 50])
            )
        };
        let text = text.trim().to_lowercase();
        let mut parts = text.split(|c: char| c == '-' || c.is_whitespace());
        let number = parts.next().unwrap_or_default();
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let number = number.parse().ok();
        let number = number.filter(|number| is_number && *number <= NUMBER_MAX);
        let number: u32 = number.ok_or_else(shape)?;
        let mut words = Vec::with_capacity(WORDS);
        for word in parts.filter(|part| !part.is_empty()) {
            let known = CODE_WORDS.binary_search(&word);
            let index =
                known.map_err(|_| format!("`{word}` is no word of a code; check the spelling"))?;
            words.push(u8::try_from(index).expect("256 words"));
        }
        let words = words.try_into().map_err(|_| shape())?;
        Ok(TransferCode { number, words })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_as_it_is_said() {
        let code = TransferCode::new(7, [0, 255, 128]);
        let text = code.to_string();
        assert_eq!(text.parse(), Ok(code.clone()));
        let said = text.replace('-', " ").to_uppercase();
        assert_eq!(format!(" {said} ").parse(), Ok(code));
    }

    #[test]
    fn what_is_no_code_is_named() {
        for wrong in [
            "",
            "7",
            "7-acorn",
            "acorn-acorn-acorn-acorn",
            "-7-acorn-acorn-acorn",
        ] {
            let error = wrong.parse::<TransferCode>().unwrap_err();
            assert!(error.contains("a number and 3 words"), "{error}");
        }
        let error = "7-acorn-acorn-acrn".parse::<TransferCode>().unwrap_err();
        assert!(error.contains("`acrn` is no word"), "{error}");
    }
}
