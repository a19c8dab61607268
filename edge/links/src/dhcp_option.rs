//! The option of DHCP by which a network names a proxy: a text, as in the settings.
//!
//! ```text
//!  option 224 of a lease ─┬─ NetworkManager: Dhcp4Config.Options, private_224 = 64:32:74:…  ─┐
//!                         └─ systemd-networkd: leases/INDEX, OPTION_224=643274…              ─┴─▶ d2tp://HOST:PORT/KEY
//! ```
//!
//! Whoever answers DHCP on the network wrote it: it is a hint, and proves nothing.

use std::path::Path;

/// The option's number: one of those that each site may use as it likes (RFC 3942), and the first that system services
/// pass on.
pub const DHCP_PROXY_OPTION: u8 = 224;
/// The most bytes of the option, which are those of one option of DHCP.
const OPTION_BYTES_MAX: usize = 255; // RFC 2132 §2
/// The folder of systemd-networkd's leases, one file for each interface index.
pub(crate) const NETWORKD_LEASES: &str = "/run/systemd/netif/leases";
/// The longest lease that is read.
const LEASE_BYTES_MAX: u64 = 64 * 1024;

/// Reads the option as system services pass it on: as text, or as hexadecimal digits with or without colons. `None`
/// unless it is printable text.
pub(crate) fn option_text(value: &str) -> Option<String> {
    let value = value.trim().trim_matches('"');
    let text = match value.contains("://") {
        true => value.to_owned(),
        false => String::from_utf8(hex_bytes(value)?).ok()?,
    };
    // Some servers end texts with a NUL.
    let text = text.trim_end_matches('\0');
    let is_text = text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    let fits = (1..=OPTION_BYTES_MAX).contains(&text.len());
    (is_text && fits).then(|| text.to_owned())
}

fn hex_bytes(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b':').collect();
    let (pairs, rest) = digits.as_chunks::<2>();
    if !rest.is_empty() || pairs.len() > OPTION_BYTES_MAX {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8; 2]| u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok();
    pairs.iter().map(byte).collect()
}

/// The option in systemd-networkd's lease of an interface, if there is one.
pub(crate) fn of_networkd_lease(leases: &Path, index: u32) -> Option<String> {
    let file = leases.join(index.to_string());
    let is_small = std::fs::metadata(&file).is_ok_and(|found| found.len() <= LEASE_BYTES_MAX);
    let lease = std::fs::read_to_string(&file).ok().filter(|_| is_small)?;
    let key = format!("OPTION_{DHCP_PROXY_OPTION}=");
    let value = lease.lines().find_map(|line| line.strip_prefix(&*key))?;
    option_text(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "d2tp://192.0.2.1:4433/KEY";

    fn hex(text: &str, separator: &str) -> String {
        let bytes: Vec<String> = text.bytes().map(|b| format!("{b:02x}")).collect();
        bytes.join(separator)
    }

    #[test]
    fn the_option_is_read_in_each_form_in_which_services_pass_it_on() {
        let quoted = format!("\"{TEXT}\"");
        let ended = format!("{TEXT}\0");
        for value in [
            TEXT,
            &quoted,
            &hex(TEXT, ":"),
            &hex(TEXT, ""),
            &hex(&ended, ""),
        ] {
            assert_eq!(option_text(value).as_deref(), Some(TEXT), "{value}");
        }
        let long = hex(&"a".repeat(256), "");
        for value in ["", "6", "6g", "é", "ff:fe", "64:0a:32", "0a0d", &long] {
            assert_eq!(option_text(value), None, "{value}");
        }
        assert_eq!(option_text(&format!("d2tp://{}", "a".repeat(300))), None);
    }

    #[test]
    fn the_lease_of_an_interface_is_found_by_its_index() {
        let name = format!("cedos-leases-{}", std::process::id());
        let leases = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&leases).unwrap();
        let lease = |index: u32, option: &str| {
            let text = format!("ADDRESS=198.51.100.7\nROUTER=198.51.100.1\n{option}\n");
            std::fs::write(leases.join(index.to_string()), text).unwrap();
        };
        lease(3, &format!("OPTION_224={}", hex(TEXT, "")));
        lease(4, &format!("OPTION_225={}", hex(TEXT, "")));
        lease(5, "OPTION_224=xyz");
        assert_eq!(of_networkd_lease(&leases, 3).as_deref(), Some(TEXT));
        for index in [4, 5, 6] {
            assert_eq!(of_networkd_lease(&leases, index), None, "{index}");
        }
        std::fs::remove_dir_all(&leases).unwrap();
    }
}
