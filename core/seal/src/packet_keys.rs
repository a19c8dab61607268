//! Packet protection: an AEAD for the frames, a mask for packet number and key bits.
//!
//! ```text
//!  nonce = IV xor (path id (32 bit) ‖ packet number (64 bit))
//!  associated data = the whole header, unmasked
//!  mask = AES or ChaCha20 of the ciphertext's first 16 bytes, as RFC 9001 §5.4
//! ```
//!
//! Each direction has a chain of key generations; the header carries the generation modulo 4. The
//! sender decides when the next generation begins. The receiver follows when a packet of the next
//! generation authenticates, and keeps the previous keys until the session expects no more late
//! packets.
//!
//! An exchange by ML-KEM ([`PacketKeys::mix_in`]) begins a second chain, the hybrid keys. One bit of
//! the header says which chain a packet belongs to:
//!
//! ```text
//!  handshake ─▶ generation 0 ─▶ 1 ─▶ …
//!      └── + ML-KEM ──▶ hybrid generation 0 ─▶ 1 ─▶ …     the device changes first, then the server
//! ```

use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey, quic};
use aws_lc_rs::{digest, hkdf};
use d2tp_wire::{CID_BYTES, DATA_HEADER_BYTES, PN_BYTES, PathId, TAG_BYTES, expand_packet_number};

use crate::SealError;
use crate::handshake::HandshakeSecrets;
use crate::kem::{KEM_KEY_BYTES, KemSecret};
use crate::session_secret::SessionSecret;

/// R-SEAL-3: the number of packets sealed with the keys of one generation. It is far below the
/// limit of AES-GCM, 2^23 full-size packets (RFC 9001 B.1.1).
pub const KEY_UPDATE_PACKETS: u64 = 1 << 22;

const FIRST_BYTE_MASK: u8 = 0x1f;
const RESERVED_BITS: u8 = 0x03;
/// R-KEM-4: set in packets that the hybrid keys seal.
const HYBRID_BIT: u8 = 0x04;
const GENERATION_SHIFT: u8 = 3;

/// Which AEAD seals a session's packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CipherSuite {
    /// AES-128-GCM, used where the processor has instructions for it.
    Aes128Gcm,
    /// ChaCha20-Poly1305, used everywhere else.
    ChaCha20Poly1305,
}

impl CipherSuite {
    /// The number of the suite in a handshake.
    pub fn code(self) -> u8 {
        match self {
            CipherSuite::Aes128Gcm => 1,
            CipherSuite::ChaCha20Poly1305 => 2,
        }
    }
    /// The suite with this number in a handshake; `None` if the number is unknown.
    pub fn from_code(code: u8) -> Option<CipherSuite> {
        match code {
            1 => Some(CipherSuite::Aes128Gcm),
            2 => Some(CipherSuite::ChaCha20Poly1305),
            _ => None,
        }
    }
    /// R-SEAL-5: the number of packets that may fail to authenticate under the keys of one
    /// handshake. Beyond it a forgery is no longer improbable enough (RFC 9001 §6.6).
    pub fn integrity_limit(self) -> u64 {
        match self {
            CipherSuite::Aes128Gcm => 1 << 52,
            CipherSuite::ChaCha20Poly1305 => 1 << 36,
        }
    }
    pub(crate) fn aead(self) -> &'static aead::Algorithm {
        match self {
            CipherSuite::Aes128Gcm => &aead::AES_128_GCM,
            CipherSuite::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        }
    }
    fn mask(self) -> &'static quic::Algorithm {
        match self {
            CipherSuite::Aes128Gcm => &quic::AES_128,
            CipherSuite::ChaCha20Poly1305 => &quic::CHACHA20,
        }
    }
}

struct HkdfLength(usize);
impl hkdf::KeyType for HkdfLength {
    fn len(&self) -> usize {
        self.0
    }
}

pub(crate) fn expand(secret: &[u8; 32], label: &[u8], out: &mut [u8]) {
    hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, secret)
        .expand(&[label], HkdfLength(out.len()))
        .and_then(|okm| okm.fill(out))
        .expect("far below HKDF's limit of 255 blocks");
}

/// Keys of one generation. The cipher's state is twenty times their size, so an idle session drops
/// it.
struct KeyGeneration {
    secret: [u8; 32],
    warm: Option<CipherContext>,
}

struct CipherContext {
    key: LessSafeKey,
    iv: [u8; 12],
}

impl KeyGeneration {
    fn new(secret: [u8; 32]) -> Self {
        KeyGeneration { secret, warm: None }
    }
    fn next(&self) -> KeyGeneration {
        let mut secret = [0; 32];
        expand(&self.secret, b"d2tp next", &mut secret);
        KeyGeneration::new(secret)
    }
    #[inline]
    fn cipher(&mut self, suite: CipherSuite) -> &CipherContext {
        if self.warm.is_none() {
            self.warm = Some(CipherContext::new(suite, &self.secret));
        }
        self.warm.as_ref().expect("just made")
    }
}

impl CipherContext {
    #[cold]
    fn new(suite: CipherSuite, secret: &[u8; 32]) -> Self {
        let mut bytes = [0u8; 32];
        let bytes = &mut bytes[..suite.aead().key_len()];
        expand(secret, b"d2tp key", bytes);
        let mut iv = [0; 12];
        expand(secret, b"d2tp iv", &mut iv);
        let key = UnboundKey::new(suite.aead(), bytes).expect("the length is the algorithm's own");
        bytes.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&bytes);
        CipherContext {
            key: LessSafeKey::new(key),
            iv,
        }
    }
    #[inline]
    fn nonce(&self, path: PathId, number: u64) -> Nonce {
        let mut n = self.iv;
        for (b, p) in n[..4].iter_mut().zip(path.0.to_be_bytes()) {
            *b ^= p;
        }
        for (b, p) in n[4..].iter_mut().zip(number.to_be_bytes()) {
            *b ^= p;
        }
        Nonce::assume_unique_for_key(n)
    }
}

impl Drop for KeyGeneration {
    fn drop(&mut self) {
        // The library erases the AEAD's key. This secret would reveal all later generations.
        self.secret.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.secret);
    }
}

/// The key that masks packet numbers, equal for all generations. Only its own bytes are kept,
/// because the secret it is derived from would reveal the keys of every generation.
struct HeaderProtection {
    bytes: [u8; 32],
    warm: Option<Box<quic::HeaderProtectionKey>>,
}

impl HeaderProtection {
    fn new(suite: CipherSuite, root: &[u8; 32]) -> HeaderProtection {
        let mut bytes = [0u8; 32];
        expand(root, b"d2tp mask", &mut bytes[..suite.mask().key_len()]);
        HeaderProtection { bytes, warm: None }
    }
    #[inline]
    fn cipher(&mut self, suite: CipherSuite) -> &quic::HeaderProtectionKey {
        let bytes = &self.bytes;
        self.warm.get_or_insert_with(|| {
            let key =
                quic::HeaderProtectionKey::new(suite.mask(), &bytes[..suite.mask().key_len()]);
            Box::new(key.expect("the length is the algorithm's own"))
        })
    }
}

impl Drop for HeaderProtection {
    fn drop(&mut self) {
        self.bytes.fill(0);
        // Keeps the compiler from removing the write above as a dead store.
        std::hint::black_box(&self.bytes);
    }
}

/// Progress of the exchange by ML-KEM.
enum HybridStage {
    /// No exchange takes place under these keys.
    Unused,
    /// The exchange is going on. The secret of the handshake that it is mixed with.
    Awaited(Box<[u8; 32]>),
    /// The hybrid keys that are not used yet, of packets sent and received.
    Agreed {
        tx: Option<Box<KeyGeneration>>,
        rx: Option<Box<KeyGeneration>>,
    },
}

impl Drop for HybridStage {
    fn drop(&mut self) {
        if let HybridStage::Awaited(secret) = self {
            secret.fill(0);
            // Keeps the compiler from removing the write above as a dead store.
            std::hint::black_box(&**secret);
        }
    }
}

/// HKDF-Extract.
fn extract(salt: &[u8; 32], parts: &[&[u8]]) -> hkdf::Prk {
    let mut input = parts.concat();
    let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&input);
    input.fill(0);
    // Keeps the compiler from removing the write above as a dead store.
    std::hint::black_box(&input);
    prk
}

/// HKDF-Expand of what [`extract`] returned.
fn expanded<const N: usize>(prk: &hkdf::Prk, label: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    prk.expand(&[label], HkdfLength(N))
        .and_then(|okm| okm.fill(&mut out))
        .expect("far below HKDF's limit of 255 blocks");
    out
}

/// A packet that was authenticated and decrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedPacket {
    /// The full packet number.
    pub number: u64,
    /// The end of the frames in the buffer; they begin at [`DATA_HEADER_BYTES`].
    pub end: usize,
    /// Whether the packet was the first of the peer's next key generation.
    pub key_advanced: bool,
}

/// The packet keys of one session, for both directions.
pub struct PacketKeys {
    suite: CipherSuite,
    tx: KeyGeneration,
    tx_generation: u64,
    tx_mask: HeaderProtection,
    rx: KeyGeneration,
    rx_before: Option<Box<KeyGeneration>>,
    /// The peer's next generation. It is computed when the first packet claims that generation,
    /// whether that packet authenticates or not: the time this takes reveals only that it was the
    /// first. Sessions that never reach it need no memory for it.
    rx_next: Option<Box<KeyGeneration>>,
    rx_generation: u64,
    rx_mask: HeaderProtection,
    /// Whether packets are sealed with hybrid keys.
    tx_hybrid: bool,
    rx_hybrid: bool,
    hybrid: HybridStage,
    failed: u64,
}

impl PacketKeys {
    /// The packet keys of a finished handshake, for its initiator or its responder.
    pub fn new(suite: CipherSuite, secrets: &HandshakeSecrets, initiator: bool) -> Self {
        PacketKeys::with_secret(suite, secrets, None, initiator)
    }

    /// R-KEM-6: the packet keys of a finished handshake that named a session secret.
    pub fn with_secret(
        suite: CipherSuite,
        secrets: &HandshakeSecrets,
        session: Option<&SessionSecret>,
        initiator: bool,
    ) -> Self {
        let session: &[u8] = session.map_or(&[], |session| &session.secret);
        let root = |key: &[u8; 32]| {
            let prk = extract(&secrets.transcript, &[key, session]);
            expanded(&prk, b"d2tp root")
        };
        let (ours, theirs) = if initiator {
            (root(&secrets.initiator), root(&secrets.responder))
        } else {
            (root(&secrets.responder), root(&secrets.initiator))
        };
        PacketKeys {
            suite,
            tx_mask: HeaderProtection::new(suite, &ours),
            tx: KeyGeneration::new(ours),
            tx_generation: 0,
            rx_mask: HeaderProtection::new(suite, &theirs),
            rx: KeyGeneration::new(theirs),
            rx_before: None,
            rx_next: None,
            rx_generation: 0,
            tx_hybrid: false,
            rx_hybrid: false,
            hybrid: HybridStage::Unused,
            failed: 0,
        }
    }

    /// R-KEM-3: lets an exchange by ML-KEM follow the handshake. Without this call
    /// [`PacketKeys::mix_in`] returns nothing.
    pub fn await_exchange(&mut self, secrets: &HandshakeSecrets) {
        let prk = extract(
            &secrets.transcript,
            &[&secrets.initiator, &secrets.responder],
        );
        self.hybrid = HybridStage::Awaited(Box::new(expanded(&prk, b"d2tp exchange")));
    }

    /// R-KEM-3: mixes the secret of an exchange by ML-KEM, and all that was sent in it, with the
    /// secret of the handshake. The result is the session's secret, and new packet keys: the device
    /// (the initiator) uses its own at once, a server once a packet under the device's has arrived.
    /// `None` if no exchange is going on.
    pub fn mix_in(
        &mut self,
        key: &[u8; KEM_KEY_BYTES],
        ciphertext: &[u8],
        secret: &KemSecret,
        initiator: bool,
    ) -> Option<SessionSecret> {
        let HybridStage::Awaited(of_handshake) = &self.hybrid else {
            return None;
        };
        let mut transcript = digest::Context::new(&digest::SHA256);
        transcript.update(key);
        transcript.update(ciphertext);
        let mut salt = [0; 32];
        salt.copy_from_slice(transcript.finish().as_ref());
        let prk = extract(&salt, &[&**of_handshake, &secret.0]);
        let root = |by_initiator: bool| {
            let label: &[u8] = match by_initiator {
                true => b"d2tp hybrid initiator",
                false => b"d2tp hybrid responder",
            };
            Some(Box::new(KeyGeneration::new(expanded(&prk, label))))
        };
        self.hybrid = HybridStage::Agreed {
            tx: root(initiator),
            rx: root(!initiator),
        };
        if initiator {
            self.send_hybrid();
        }
        Some(SessionSecret {
            id: expanded(&prk, b"d2tp secret id"),
            secret: expanded(&prk, b"d2tp secret"),
        })
    }

    /// Seals packets with the hybrid keys from now on, if they are agreed.
    fn send_hybrid(&mut self) {
        if let HybridStage::Agreed { tx, .. } = &mut self.hybrid
            && let Some(next) = tx.take()
        {
            (self.tx, self.tx_generation, self.tx_hybrid) = (*next, 0, true);
        }
    }

    /// Whether packets are sealed with hybrid keys, and whether one was received.
    pub fn are_hybrid(&self) -> (bool, bool) {
        (self.tx_hybrid, self.rx_hybrid)
    }

    /// The AEAD that the session uses.
    pub fn suite(&self) -> CipherSuite {
        self.suite
    }

    /// Seals a DATA packet in place. `packet` is header (first byte, cid, four bytes for the
    /// number), frames, and [`TAG_BYTES`] free bytes at the end.
    #[inline]
    pub fn seal(&mut self, path: PathId, number: u64, packet: &mut [u8]) {
        assert!(packet.len() >= DATA_HEADER_BYTES + TAG_BYTES);
        packet[0] = (packet[0] & !FIRST_BYTE_MASK)
            | ((self.tx_generation as u8 & 3) << GENERATION_SHIFT)
            | (HYBRID_BIT * u8::from(self.tx_hybrid));
        packet[1 + CID_BYTES..DATA_HEADER_BYTES].copy_from_slice(&(number as u32).to_be_bytes());
        let (header, body) = packet.split_at_mut(DATA_HEADER_BYTES);
        let (text, tag) = body.split_at_mut(body.len() - TAG_BYTES);
        let warm = self.tx.cipher(self.suite);
        let made = warm
            .key
            .seal_in_place_separate_tag(warm.nonce(path, number), Aad::from(&*header), text)
            .expect("a datagram is far below the AEAD's limit");
        tag.copy_from_slice(made.as_ref());
        Self::toggle_mask(self.tx_mask.cipher(self.suite), packet);
    }

    /// Opens a DATA packet in place. `expected` is the number after the largest one received on
    /// this path. A packet that fails to authenticate is counted ([`PacketKeys::failed`]) and
    /// changes nothing else.
    #[inline]
    pub fn open(
        &mut self,
        path: PathId,
        expected: u64,
        packet: &mut [u8],
    ) -> Result<OpenedPacket, SealError> {
        if packet.len() < DATA_HEADER_BYTES + TAG_BYTES {
            return Err(SealError::BadLength);
        }
        Self::toggle_mask(self.rx_mask.cipher(self.suite), packet);
        let generation = (packet[0] >> GENERATION_SHIFT) & 3;
        let mut low = [0; PN_BYTES];
        low.copy_from_slice(&packet[1 + CID_BYTES..DATA_HEADER_BYTES]);
        let number = expand_packet_number(expected, u32::from_be_bytes(low));
        let current = self.rx_generation as u8 & 3;
        let is_hybrid = packet[0] & HYBRID_BIT != 0;
        let step = match (is_hybrid, self.rx_hybrid) {
            // R-KEM-4: a late packet from before the exchange.
            (false, true) => 3,
            // R-KEM-4: the hybrid keys begin with generation 0.
            (true, false) if generation != 0 => return Err(SealError::NotAuthentic),
            (true, false) => 1,
            _ => generation.wrapping_sub(current) & 3,
        };
        let (key, key_advanced) = match step {
            0 => (&mut self.rx, false),
            1 if is_hybrid && !self.rx_hybrid => match &mut self.hybrid {
                HybridStage::Agreed { rx: Some(rx), .. } => (&mut **rx, true),
                _ => return Err(SealError::NotAuthentic),
            },
            1 => {
                let rx = &self.rx;
                let next = self.rx_next.get_or_insert_with(|| Box::new(rx.next()));
                (&mut **next, true)
            }
            3 => (
                &mut **self.rx_before.as_mut().ok_or(SealError::NotAuthentic)?,
                false,
            ),
            _ => return Err(SealError::NotAuthentic),
        };
        let (header, body) = packet.split_at_mut(DATA_HEADER_BYTES);
        let text = body.len() - TAG_BYTES;
        let warm = key.cipher(self.suite);
        if warm
            .key
            .open_in_place(warm.nonce(path, number), Aad::from(&*header), body)
            .is_err()
        {
            // R-SEAL-5
            self.failed += 1;
            return Err(SealError::NotAuthentic);
        }
        if header[0] & RESERVED_BITS != 0 {
            return Err(SealError::NotAuthentic);
        }
        if key_advanced {
            self.follow(is_hybrid);
        }
        Ok(OpenedPacket {
            number,
            end: DATA_HEADER_BYTES + text,
            key_advanced,
        })
    }

    /// Takes up the keys under which a packet has just authenticated.
    #[cold]
    fn follow(&mut self, is_hybrid: bool) {
        let begins = is_hybrid && !self.rx_hybrid;
        let next = match &mut self.hybrid {
            HybridStage::Agreed { rx, .. } if begins => rx.take(),
            _ => self.rx_next.take(),
        };
        let Some(mut next) = next else { return };
        std::mem::swap(&mut self.rx, &mut *next);
        self.rx_before = Some(next);
        self.rx_generation += 1;
        if begins {
            (self.rx_generation, self.rx_hybrid, self.rx_next) = (0, true, None);
            self.send_hybrid();
        }
    }

    /// Begins the next key generation for the packets that this host sends.
    pub fn advance(&mut self) {
        self.tx = self.tx.next();
        self.tx_generation += 1;
    }

    /// The number of packets that failed to authenticate, over all generations.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// How often this host's keys and the peer's keys were updated, in this order.
    pub fn generations(&self) -> (u64, u64) {
        (self.tx_generation, self.rx_generation)
    }

    /// Whether [`PacketKeys::drop_ciphers`] would free memory.
    #[inline]
    pub fn has_ciphers(&self) -> bool {
        self.tx.warm.is_some() || self.rx.warm.is_some()
    }

    /// Drops the cipher states while the session is idle. The next packet, sent or received,
    /// computes them again.
    pub fn drop_ciphers(&mut self) {
        self.tx.warm = None;
        self.tx_mask.warm = None;
        self.rx.warm = None;
        self.rx_mask.warm = None;
        self.rx_next = None;
    }

    /// Drops the keys of the peer's previous generation, because its late packets are no longer
    /// expected.
    pub fn forget_previous(&mut self) {
        self.rx_before = None;
    }

    #[inline]
    fn toggle_mask(key: &quic::HeaderProtectionKey, packet: &mut [u8]) {
        let sample = &packet[DATA_HEADER_BYTES..DATA_HEADER_BYTES + 16];
        let mask = key
            .new_mask(sample)
            .expect("the sample has the length the mask wants");
        packet[0] ^= mask[0] & FIRST_BYTE_MASK;
        for (b, m) in packet[1 + CID_BYTES..DATA_HEADER_BYTES]
            .iter_mut()
            .zip(&mask[1..])
        {
            *b ^= m;
        }
    }
}

impl std::fmt::Debug for PacketKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "PacketKeys({:?}, {}/{})",
            self.suite, self.tx_generation, self.rx_generation
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_wire::PacketKind;

    fn pair(suite: CipherSuite) -> (PacketKeys, PacketKeys) {
        let s = HandshakeSecrets {
            initiator: [1; 32],
            responder: [2; 32],
            transcript: [3; 32],
        };
        (
            PacketKeys::new(suite, &s, true),
            PacketKeys::new(suite, &s, false),
        )
    }

    fn packet(text: &[u8]) -> Vec<u8> {
        let mut p = vec![PacketKind::Data.first_byte()];
        p.extend([9; CID_BYTES]);
        p.extend([0; PN_BYTES]);
        p.extend(text);
        p.extend([0; TAG_BYTES]);
        p
    }

    #[test]
    fn a_sealed_packet_opens_only_unaltered_and_on_its_own_path() {
        for suite in [CipherSuite::Aes128Gcm, CipherSuite::ChaCha20Poly1305] {
            let (mut tx, mut rx) = pair(suite);
            let mut p = packet(b"some frames");
            tx.seal(PathId(4), 7, &mut p);
            for bit in 0..p.len() * 8 {
                let mut bad = p.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    rx.open(PathId(4), 7, &mut bad).is_err(),
                    "bit {bit} was not noticed"
                );
            }
            // R-SEAL-5: packets that name a generation without keys were never tried and do not
            // count.
            let failed = rx.failed();
            assert!(failed >= p.len() as u64 && failed <= p.len() as u64 * 8);
            assert!(rx.open(PathId(5), 7, &mut p.clone()).is_err());
            let mut good = p.clone();
            let opened = rx.open(PathId(4), 3, &mut good).unwrap();
            assert_eq!(
                opened,
                OpenedPacket {
                    number: 7,
                    end: good.len() - TAG_BYTES,
                    key_advanced: false
                }
            );
            assert_eq!(&good[DATA_HEADER_BYTES..opened.end], b"some frames");
            assert_eq!(rx.failed(), failed + 1, "only what does not open counts");
        }
    }

    /// Both ends after an exchange whose secret is `secret`.
    fn exchanged(secret: [u8; 32]) -> (PacketKeys, PacketKeys) {
        let (mut device, mut server) = pair(CipherSuite::Aes128Gcm);
        let s = HandshakeSecrets {
            initiator: [1; 32],
            responder: [2; 32],
            transcript: [3; 32],
        };
        let (key, ciphertext, secret) = ([4; KEM_KEY_BYTES], [5; 1088], KemSecret(secret));
        assert!(device.mix_in(&key, &ciphertext, &secret, true).is_none());
        device.await_exchange(&s);
        server.await_exchange(&s);
        let a = device.mix_in(&key, &ciphertext, &secret, true).unwrap();
        let b = server.mix_in(&key, &ciphertext, &secret, false).unwrap();
        assert_eq!((a.id, a.secret), (b.id, b.secret));
        assert!(device.mix_in(&key, &ciphertext, &secret, true).is_none());
        (device, server)
    }

    #[test]
    fn each_direction_changes_to_hybrid_keys_and_late_packets_are_read_until_they_are_forgotten() {
        // R-KEM-3, R-KEM-4
        let send = |keys: &mut PacketKeys, number| {
            let mut p = packet(b"some frames");
            keys.seal(PathId(0), number, &mut p);
            p
        };
        let (mut device, mut server) = exchanged([6; 32]);
        assert_eq!(
            (device.are_hybrid(), server.are_hybrid()),
            ((true, false), (false, false))
        );
        let mut early = send(&mut server, 0);
        let mut late = send(&mut server, 1);
        assert!(!device.open(PathId(0), 0, &mut early).unwrap().key_advanced);
        let mut first = send(&mut device, 0);
        assert!(server.open(PathId(0), 0, &mut first).unwrap().key_advanced);
        assert_eq!(server.are_hybrid(), (true, true), "the device has the keys");
        for number in 2..9 {
            if number % 3 == 0 {
                server.advance();
            }
            let mut p = send(&mut server, number);
            let opened = device.open(PathId(0), number, &mut p).unwrap();
            assert_eq!(opened.key_advanced, number == 2 || number % 3 == 0);
            if number == 2 {
                assert!(device.open(PathId(0), 2, &mut late.clone()).is_ok());
                device.forget_previous();
                assert!(device.open(PathId(0), 2, &mut late).is_err());
            }
        }
        // Another secret gives other keys.
        let mut p = send(&mut device, 1);
        let mut other = exchanged([7; 32]).1;
        assert!(other.open(PathId(0), 0, &mut p).is_err());
    }

    #[test]
    fn without_an_exchange_the_bit_of_hybrid_keys_makes_a_packet_unreadable() {
        // R-SEAL-1, R-KEM-4
        let (mut device, _) = exchanged([6; 32]);
        let (_, mut server) = pair(CipherSuite::Aes128Gcm);
        let mut p = packet(b"some frames");
        device.seal(PathId(0), 0, &mut p);
        assert!(server.open(PathId(0), 0, &mut p).is_err());
        assert_eq!(server.are_hybrid(), (false, false));
    }

    #[test]
    fn a_handshake_with_a_session_secret_has_keys_of_its_own() {
        // R-KEM-6
        let s = HandshakeSecrets {
            initiator: [1; 32],
            responder: [2; 32],
            transcript: [3; 32],
        };
        let secret = |n| SessionSecret {
            id: [0; 8],
            secret: [n; 32],
        };
        let keys = |secret, initiator| {
            PacketKeys::with_secret(CipherSuite::Aes128Gcm, &s, secret, initiator)
        };
        let (right, wrong) = (secret(1), secret(2));
        let mut p = packet(b"some frames");
        keys(Some(&right), true).seal(PathId(0), 0, &mut p);
        for (other, opens) in [(Some(&right), true), (Some(&wrong), false), (None, false)] {
            let opened = keys(other, false).open(PathId(0), 0, &mut p.clone());
            assert_eq!(opened.is_ok(), opens);
        }
    }

    #[test]
    fn cooled_keys_go_on_where_they_were() {
        for suite in [CipherSuite::Aes128Gcm, CipherSuite::ChaCha20Poly1305] {
            let (mut tx, mut rx) = pair(suite);
            for number in 0..4 {
                if number == 2 {
                    tx.advance();
                }
                let mut p = packet(b"some frames");
                tx.seal(PathId(0), number, &mut p);
                let opened = rx.open(PathId(0), number, &mut p).unwrap();
                assert_eq!(&p[DATA_HEADER_BYTES..opened.end], b"some frames");
                assert!(tx.has_ciphers() && rx.has_ciphers());
                tx.drop_ciphers();
                rx.drop_ciphers();
                assert!(!tx.has_ciphers() && !rx.has_ciphers());
            }
            assert_eq!((tx.generations().0, rx.generations().1), (1, 1));
        }
    }

    #[test]
    fn the_receiver_follows_a_key_update_and_still_reads_late_packets() {
        // R-SEAL-3
        let (mut tx, mut rx) = pair(CipherSuite::Aes128Gcm);
        let mut late = packet(b"late");
        tx.seal(PathId(0), 1, &mut late);
        for generation in 1..=6 {
            tx.advance();
            let mut p = packet(b"new");
            tx.seal(PathId(0), 1 + generation, &mut p);
            assert!(rx.open(PathId(0), generation, &mut p).unwrap().key_advanced);
            if generation == 1 {
                assert!(
                    !rx.open(PathId(0), 2, &mut late.clone())
                        .unwrap()
                        .key_advanced
                );
                rx.forget_previous();
                assert!(rx.open(PathId(0), 2, &mut late.clone()).is_err());
            }
        }
    }
}
