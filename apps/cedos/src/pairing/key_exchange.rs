//! The key exchange of sender and receiver in a mailbox.
//!
//! ```text
//!  receiver ── SPAKE2 ─▶ sender      a password-authenticated key exchange: who does not know the
//!           ◀── SPAKE2 ──            words learns one thing, that one guess was wrong
//!           ── sealed: its key ─▶
//!           ◀── sealed: what is offered, and where ──
//! ```
//!
//! A message is its length (2 bytes) and that many bytes. Each direction has its own key, for one
//! message.

use aws_lc_rs::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spake2::{Ed25519Group, Identity, Password, Spake2};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::PairingError;
use super::transfer_code::TransferCode;

/// The largest message.
const MESSAGE_BYTES_MAX: usize = 4_096;

const SENDER: &[u8] = b"cedos send 1";
const RECEIVER: &[u8] = b"cedos receive 1";

/// What a receiver tells of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiverHello {
    /// Its public key, by which the sender lets it in.
    pub key: String,
}

/// What a sender offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileOffer {
    /// The sender's public key.
    pub key: String,
    /// The secret part of the file's URL, for this transfer alone.
    pub token: String,
    /// The name of the file.
    pub name: String,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The digest of the file, in hexadecimal.
    pub sha256: String,
}

/// The sender's side. `admit` lets the receiver in before it learns where the file is; returns what that
/// returns.
///
/// # Errors
/// The other end does not know the code, left, or cannot be let in.
pub async fn offer_to<T>(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    code: &TransferCode,
    offer: &FileOffer,
    admit: impl AsyncFnOnce(ReceiverHello) -> Option<T>,
) -> Result<T, PairingError> {
    let password = Password::new(code.password());
    let identities = (Identity::new(SENDER), Identity::new(RECEIVER));
    let (state, message) = Spake2::<Ed25519Group>::start_a(&password, &identities.0, &identities.1);
    let theirs = read_message(stream).await?;
    write_message(stream, &message).await?;
    let keys = DirectionKeys::of(state.finish(&theirs))?;
    let hello = open(&keys.by_receiver, read_message(stream).await?)?;
    let admitted = admit(hello).await.ok_or(PairingError::ProxyLost)?;
    write_message(stream, &seal(&keys.by_sender, offer)).await?;
    Ok(admitted)
}

/// The receiver's side: returns what is offered.
///
/// # Errors
/// The other end does not know the code, or left.
pub async fn accept(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    code: &TransferCode,
    hello: &ReceiverHello,
) -> Result<FileOffer, PairingError> {
    let password = Password::new(code.password());
    let identities = (Identity::new(SENDER), Identity::new(RECEIVER));
    let (state, message) = Spake2::<Ed25519Group>::start_b(&password, &identities.0, &identities.1);
    write_message(stream, &message).await?;
    let theirs = read_message(stream).await?;
    let keys = DirectionKeys::of(state.finish(&theirs))?;
    write_message(stream, &seal(&keys.by_receiver, hello)).await?;
    match read_message(stream).await {
        Ok(sealed) => open(&keys.by_sender, sealed),
        // The sender found that what we sealed is under another password, and left.
        Err(PairingError::PeerLeft) => Err(PairingError::WrongCode),
        Err(error) => Err(error),
    }
}

/// A key for each direction.
struct DirectionKeys {
    by_sender: LessSafeKey,
    by_receiver: LessSafeKey,
}

impl DirectionKeys {
    fn of(shared: Result<Vec<u8>, spake2::Error>) -> Result<DirectionKeys, PairingError> {
        let shared = shared.map_err(|_| PairingError::WrongCode)?;
        let secret = Salt::new(HKDF_SHA256, b"cedos pairing").extract(&shared);
        let key = |label: &[u8]| {
            let label = [label];
            let bytes = secret.expand(&label, &CHACHA20_POLY1305);
            let key = bytes.map(|bytes| LessSafeKey::new(UnboundKey::from(bytes)));
            key.expect("a key is shorter than HKDF's limit")
        };
        Ok(DirectionKeys {
            by_sender: key(SENDER),
            by_receiver: key(RECEIVER),
        })
    }
}

/// The nonce of the only message of a key.
fn only_nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

fn seal(key: &LessSafeKey, what: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(what).expect("plain data");
    key.seal_in_place_append_tag(only_nonce(), Aad::empty(), &mut bytes)
        .expect("it is short");
    bytes
}

fn open<T: DeserializeOwned>(key: &LessSafeKey, mut sealed: Vec<u8>) -> Result<T, PairingError> {
    let opened = key.open_in_place(only_nonce(), Aad::empty(), &mut sealed);
    let plain = opened.map_err(|_| PairingError::WrongCode)?;
    serde_json::from_slice(plain).map_err(|_| PairingError::OtherVersion)
}

async fn write_message(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &[u8],
) -> Result<(), PairingError> {
    let length = u16::try_from(message.len()).expect("messages are short");
    let framed = [&length.to_be_bytes()[..], message].concat();
    stream
        .write_all(&framed)
        .await
        .map_err(|_| PairingError::PeerLeft)?;
    stream.flush().await.map_err(|_| PairingError::PeerLeft)
}

async fn read_message(stream: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, PairingError> {
    let length = stream
        .read_u16()
        .await
        .map_err(|_| PairingError::PeerLeft)?;
    let length = usize::from(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(PairingError::OtherVersion);
    }
    let mut message = vec![0; length];
    let read = stream.read_exact(&mut message).await;
    read.map_err(|_| PairingError::PeerLeft)?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    fn hello() -> ReceiverHello {
        ReceiverHello {
            key: "receiver".into(),
        }
    }

    fn file() -> FileOffer {
        FileOffer {
            key: "sender".into(),
            token: "token".into(),
            name: "a.pdf".into(),
            bytes: 7,
            sha256: "00".into(),
        }
    }

    async fn paired(
        by_sender: &TransferCode,
        by_receiver: &TransferCode,
    ) -> (
        Result<ReceiverHello, PairingError>,
        Result<FileOffer, PairingError>,
    ) {
        let (one, other) = duplex(1024);
        let sender = async move {
            let mut stream = one;
            offer_to(&mut stream, by_sender, &file(), async |hello| Some(hello)).await
        };
        let receiver = async move {
            let mut stream = other;
            accept(&mut stream, by_receiver, &hello()).await
        };
        tokio::join!(sender, receiver)
    }

    #[tokio::test]
    async fn who_knows_the_code_learns_the_key_and_the_file() {
        let code = TransferCode::new(4, [1, 2, 3]);
        let (hello_of, file_of) = paired(&code, &code).await;
        assert_eq!((hello_of.unwrap(), file_of.unwrap()), (hello(), file()));
    }

    #[tokio::test]
    async fn who_has_one_word_wrong_learns_nothing_and_both_are_told() {
        let (right, wrong) = (
            TransferCode::new(4, [1, 2, 3]),
            TransferCode::new(4, [1, 2, 4]),
        );
        let (sender, receiver) = paired(&right, &wrong).await;
        assert!(matches!(sender, Err(PairingError::WrongCode)), "{sender:?}");
        assert!(
            matches!(receiver, Err(PairingError::WrongCode)),
            "{receiver:?}"
        );
    }

    #[tokio::test]
    async fn one_that_leaves_is_not_waited_for() {
        let (mut one, other) = duplex(1024);
        drop(other);
        let code = TransferCode::new(4, [1, 2, 3]);
        let left = offer_to(&mut one, &code, &file(), async |hello| Some(hello)).await;
        assert!(matches!(left, Err(PairingError::PeerLeft)), "{left:?}");
    }
}
