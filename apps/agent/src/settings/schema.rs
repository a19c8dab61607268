//! The schema of all settings: key, type, default, and meaning. The page `docs/settings.md`, `cedos
//! config show` and the checks of values are made from this table.

use std::net::SocketAddr;
use std::str::FromStr;

use d2tp_driver::{SERVERS_MAX, ServerAddress, ServerListError};
use d2tp_links::CapCutoff;
use d2tp_sched::{CostPolicy, DeadlineFallback, EnergySaving};

use crate::fetch::option_parsers;
use crate::proxy::traffic_rule::TrafficRule;

/// What the value of a setting may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingKind {
    /// The name of a proxy in `[proxies]`, or an address.
    Proxy,
    /// The address of an HTTP proxy.
    HttpProxy,
    /// When metered networks are used.
    Policy,
    /// What happens when free networks alone will miss the deadline.
    IfLate,
    /// A length of time.
    Span,
    /// A number of bytes.
    Size,
    /// An address of this machine, and a port.
    Listen,
    /// True or false.
    Switch,
    /// A file or directory name.
    Path,
    /// A day of the month.
    Day,
    /// What happens at a cap.
    Cutoff,
    /// The address of a service of the web.
    WebAddress,
    /// The key by which a service knows the user.
    ApiKey,
    /// When energy is saved.
    EnergySaving,
    /// Rules that tell traffic of `cedos vpn` apart.
    TrafficRules,
}

/// A setting and its schema.
#[derive(Clone, Copy, Debug)]
pub struct SettingSchema {
    /// The key: the table, a dot, and the name in it.
    pub key: &'static str,
    /// What the value may be.
    pub kind: SettingKind,
    /// The default value; `None` if there is none.
    pub default: Option<&'static str>,
    /// The environment variable that sets it, too.
    pub environment: Option<&'static str>,
    /// The option that sets it for one command.
    pub option: &'static str,
    /// What it means, for people.
    pub meaning: &'static str,
}

/// The table of proxies: names, with an address each.
pub const PROXIES_TABLE: &str = "proxies";
/// The array of rules for networks (`d2tp_links::NetworkRules`).
pub const NETWORK_TABLE: &str = "network";

/// All settings, but the proxies themselves and the rules for networks.
pub const SETTINGS: &[SettingSchema] = &[
    SettingSchema {
        key: "proxy.default",
        kind: SettingKind::Proxy,
        default: None,
        environment: Some("CEDOS_PROX"),
        option: "--prox",
        meaning: "The proxies that commands use, the preferred one first: a name in `[proxies]` or an address, or a list of them, of which the nearest that answers is used. `cedos join` sets it.",
    },
    SettingSchema {
        key: "proxy.http",
        kind: SettingKind::HttpProxy,
        default: None,
        environment: Some("HTTPS_PROXY"),
        option: "",
        meaning: "The HTTP proxy through which streams go where a network blocks UDP; `NO_PROXY` excepts hosts.",
    },
    SettingSchema {
        key: "proxy.discover",
        kind: SettingKind::Switch,
        default: Some("true"),
        environment: None,
        option: "",
        meaning: "Whether free local networks are asked where the proxies are whose keys this device has (docs/networks.md).",
    },
    SettingSchema {
        key: "device.key_file",
        kind: SettingKind::Path,
        default: Some("~/.config/cedos/key"),
        environment: Some("CEDOS_KEY_FILE"),
        option: "--key",
        meaning: "The file with this device's private key, by which proxies know it. Made on first use.",
    },
    SettingSchema {
        key: "transfer.policy",
        kind: SettingKind::Policy,
        default: Some("free-first"),
        environment: None,
        option: "--policy",
        meaning: "When downloads and uploads use metered networks.",
    },
    SettingSchema {
        key: "transfer.within",
        kind: SettingKind::Span,
        default: Some("6h"),
        environment: None,
        option: "--within",
        meaning: "The time until the deadline of transfers that name none.",
    },
    SettingSchema {
        key: "transfer.if_late",
        kind: SettingKind::IfLate,
        default: Some("cell"),
        environment: None,
        option: "--if-late",
        meaning: "What to do when free networks alone will miss the deadline.",
    },
    SettingSchema {
        key: "transfer.max_cell",
        kind: SettingKind::Size,
        default: None,
        environment: None,
        option: "--max-cell",
        meaning: "The most metered data that one transfer may use.",
    },
    SettingSchema {
        key: "energy.save",
        kind: SettingKind::EnergySaving,
        default: Some("auto"),
        environment: None,
        option: "--save-energy",
        meaning: "When radios rest that carry few bits per joule: `auto`, on battery and while there is time until the deadline; `always`; `never`.",
    },
    SettingSchema {
        key: "energy.radios",
        kind: SettingKind::Path,
        default: None,
        environment: None,
        option: "",
        meaning: "A file with the power of this device's radios, in place of those that the program has (edge/power/radios.toml).",
    },
    SettingSchema {
        key: "energy.supplies",
        kind: SettingKind::Path,
        default: Some("/sys/class/power_supply"),
        environment: Some("CEDOS_POWER_SUPPLIES"),
        option: "",
        meaning: "Where the system says whether the machine runs on battery.",
    },
    SettingSchema {
        key: "directories.downloads",
        kind: SettingKind::Path,
        default: None,
        environment: None,
        option: "-o",
        meaning: "Where downloads go that name no file; the working directory if unset.",
    },
    SettingSchema {
        key: "directories.state",
        kind: SettingKind::Path,
        default: Some("~/.local/state/cedos"),
        environment: None,
        option: "",
        meaning: "Where the queue, partial uploads and what was learnt of networks are kept.",
    },
    SettingSchema {
        key: "budget.cap",
        kind: SettingKind::Size,
        default: None,
        environment: None,
        option: "cedos budget set",
        meaning: "The metered data that all transfers together may use in a month.",
    },
    SettingSchema {
        key: "budget.reset_day",
        kind: SettingKind::Day,
        default: Some("1"),
        environment: None,
        option: "cedos budget set --reset-day",
        meaning: "The day of the month on which the budget begins anew.",
    },
    SettingSchema {
        key: "budget.cutoff",
        kind: SettingKind::Cutoff,
        default: Some("hard"),
        environment: None,
        option: "cedos budget set --cutoff",
        meaning: "What happens when the budget is used up: `hard`, nothing metered any more; `soft`, a notice; `cautious`, as `hard` but a tenth earlier.",
    },
    SettingSchema {
        key: "agent.proxy",
        kind: SettingKind::Listen,
        default: None,
        environment: None,
        option: "cedos agent --proxy",
        meaning: "Where the agent is a SOCKS5 and HTTP proxy for this user's programs.",
    },
    SettingSchema {
        key: "agent.proxy_policy",
        kind: SettingKind::Policy,
        default: Some("any"),
        environment: None,
        option: "cedos agent --proxy-policy",
        meaning: "When connections of that proxy use metered networks.",
    },
    SettingSchema {
        key: "agent.metrics",
        kind: SettingKind::Listen,
        default: None,
        environment: None,
        option: "cedos agent --metrics",
        meaning: "Where the agent serves Prometheus metrics.",
    },
    SettingSchema {
        key: "agent.geoclue",
        kind: SettingKind::Switch,
        default: Some("false"),
        environment: None,
        option: "",
        meaning: "Whether the agent asks GeoClue where the device is, as `agent.gpsd` does gpsd, which comes first. GeoClue asks the user's desktop, and may ask a service in the Internet with the names of near access points.",
    },
    SettingSchema {
        key: "agent.gpsd",
        kind: SettingKind::Listen,
        default: None,
        environment: None,
        option: "",
        meaning: "Where gpsd answers, often `127.0.0.1:2947`: then the agent learns by squares of 100 m how long networks are away, and for which outages a radio that sleeps is worth waking (docs/bridge.md). Positions stay on this device.",
    },
    SettingSchema {
        key: "agent.notifications",
        kind: SettingKind::Switch,
        default: Some("true"),
        environment: None,
        option: "cedos agent --no-notifications",
        meaning: "Whether the agent shows notifications on the desktop.",
    },
    SettingSchema {
        key: "agent.sandbox",
        kind: SettingKind::Switch,
        default: Some("true"),
        environment: None,
        option: "cedos agent --no-sandbox",
        meaning: "Whether the agent gives up what it does not need: starting programs, writing the system's files.",
    },
    SettingSchema {
        key: "agent.short_queues",
        kind: SettingKind::Switch,
        default: Some("true"),
        environment: None,
        option: "cedos agent --short-queues",
        meaning: "Whether the agent keeps the queues of bloated networks short for all connections of this user's programs.",
    },
    SettingSchema {
        key: "agent.look_every",
        kind: SettingKind::Span,
        default: None,
        environment: None,
        option: "cedos agent --look-every",
        meaning: "How often the agent scans for networks while a transfer waits; when it seems worth it if unset.",
    },
    SettingSchema {
        key: "podcasts.directory",
        kind: SettingKind::Path,
        default: None,
        environment: None,
        option: "",
        meaning: "Where episodes of podcasts go; `Podcasts` in the user's folder of music, else in the home directory, if unset.",
    },
    SettingSchema {
        key: "podcasts.search_url",
        kind: SettingKind::WebAddress,
        default: Some("https://itunes.apple.com/search"),
        environment: None,
        option: "",
        meaning: "The directory that `cedos cast search` asks, which must answer as the search of iTunes does.",
    },
    SettingSchema {
        key: "podcasts.index_key",
        kind: SettingKind::ApiKey,
        default: None,
        environment: None,
        option: "",
        meaning: "Your key for Podcast Index, which `cedos cast search` asks in place of iTunes if there is one.",
    },
    SettingSchema {
        key: "podcasts.index_secret_file",
        kind: SettingKind::Path,
        default: None,
        environment: None,
        option: "",
        meaning: "The file with the secret of that key; let only yourself read it.",
    },
    SettingSchema {
        key: "podcasts.index_url",
        kind: SettingKind::WebAddress,
        default: Some("https://api.podcastindex.org/api/1.0/search/byterm"),
        environment: None,
        option: "",
        meaning: "Where Podcast Index is searched with your key.",
    },
    SettingSchema {
        key: "vpn.rules",
        kind: SettingKind::TrafficRules,
        default: None,
        environment: None,
        option: "cedos vpn up --rule",
        meaning: "Which traffic of `cedos vpn` may use metered networks, and when; the first rule that matches decides. Those of the option come first.",
    },
];

/// The most bytes of the key of a service.
const API_KEY_BYTES_MAX: usize = 256; // a guess: Podcast Index gives 20

/// The most mistakes in a key for which a similar key is suggested.
const MISTAKES_MAX: usize = 4;

/// The fewest bytes of the beginning of a key by which it is suggested. A guess.
const PREFIX_BYTES_MIN: usize = 4;

/// The setting with this key.
///
/// # Errors
/// There is none; the text names the one that was probably meant.
pub fn setting(key: &str) -> Result<&'static SettingSchema, String> {
    let known = SETTINGS.iter().find(|setting| setting.key == key);
    known.ok_or_else(|| unknown_key(key))
}

/// Says that there is no such key, and which was probably meant.
pub fn unknown_key(key: &str) -> String {
    let tables = [PROXIES_TABLE, NETWORK_TABLE].into_iter();
    let all = SETTINGS.iter().map(|setting| setting.key).chain(tables);
    match nearest_key(key, all) {
        Some(known) => format!("there is no setting `{key}`; do you mean `{known}`?"),
        None => format!("there is no setting `{key}`; `cedos config show` lists them"),
    }
}

/// The key of a file of settings that was probably meant by one that is not known.
pub fn nearest_key<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |known: &&str| {
        // Whoever leaves the table out means a key of that name, and whoever leaves the unit out the same.
        let name = known.split_once('.').map_or(*known, |(_, name)| name);
        if key.len() >= PREFIX_BYTES_MIN && known.starts_with(key) {
            return 1;
        }
        strsim::damerau_levenshtein(key, known).min(strsim::damerau_levenshtein(key, name))
    };
    known.min_by_key(distance).filter(|known| {
        let mistakes = distance(known);
        // A short key is near to others with which it has next to nothing in common.
        mistakes <= MISTAKES_MAX && 2 * mistakes <= key.len()
    })
}

impl SettingKind {
    /// Checks a value.
    ///
    /// # Errors
    /// The error in a value of this kind, in a sentence.
    pub fn check(self, text: &str) -> Result<(), String> {
        fn word<T: FromStr, const N: usize>(text: &str, all: [&str; N]) -> Result<(), String> {
            let list = || format!("`{text}` is not one of {}", all.join(", "));
            text.parse::<T>().map(drop).map_err(|_| list())
        }
        match self {
            SettingKind::Proxy => check_proxies(text),
            SettingKind::HttpProxy => {
                d2tp_driver::check_http_proxy(text).map_err(|error| error.to_string())
            }
            SettingKind::Policy => {
                word::<CostPolicy, _>(text, CostPolicy::ALL.map(CostPolicy::as_str))
            }
            SettingKind::IfLate => {
                let all = DeadlineFallback::ALL.map(DeadlineFallback::as_str);
                word::<DeadlineFallback, _>(text, all)
            }
            SettingKind::EnergySaving => {
                word::<EnergySaving, _>(text, EnergySaving::ALL.map(EnergySaving::as_str))
            }
            SettingKind::TrafficRules => TrafficRule::parse_list(text).map(drop),
            SettingKind::Span => option_parsers::parse_span(text).map(drop),
            SettingKind::Size => option_parsers::parse_bytes(text).map(drop),
            SettingKind::Listen => match text.parse::<SocketAddr>() {
                Ok(at) if at.ip().is_loopback() => Ok(()),
                Ok(_) => Err(format!(
                    "{text} is not an address of this machine, such as 127.0.0.1:1080"
                )),
                Err(_) => Err(format!(
                    "`{text}` is no address with a port, such as 127.0.0.1:1080"
                )),
            },
            SettingKind::Switch => match text {
                "true" | "false" => Ok(()),
                _ => Err(format!("`{text}` is neither true nor false")),
            },
            SettingKind::Path => match text {
                "" => Err("a path is needed".to_owned()),
                _ => Ok(()),
            },
            SettingKind::Day => match text.parse::<u8>() {
                Ok(1..=31) => Ok(()),
                _ => Err(format!("`{text}` is no day of a month, 1 to 31")),
            },
            SettingKind::Cutoff => parse_cutoff(text).map(drop),
            SettingKind::ApiKey => {
                let fits = (1..=API_KEY_BYTES_MAX).contains(&text.len())
                    && text.bytes().all(|byte| byte.is_ascii_graphic());
                fits.then_some(()).ok_or_else(|| {
                    format!("`{text}` is no key: letters, digits and signs, without spaces")
                })
            }
            SettingKind::WebAddress => match text.parse::<url::Url>() {
                Ok(url) if matches!(url.scheme(), "http" | "https") => Ok(()),
                Ok(url) => Err(format!("{}: is neither http: nor https:", url.scheme())),
                Err(error) => Err(format!("`{text}` is no address: {error}")),
            },
        }
    }

    /// What a value looks like, for the page of settings.
    pub fn describe(self) -> String {
        let words = |all: &[&str]| format!("`{}`", all.join("`, `"));
        match self {
            SettingKind::Proxy => "name or `d2tp://HOST:PORT/KEY`, or an array of them".to_owned(),
            SettingKind::HttpProxy => {
                "`http://HOST:PORT`, `http://NAME:PASSWORD@HOST:PORT`".to_owned()
            }
            SettingKind::Policy => words(&CostPolicy::ALL.map(CostPolicy::as_str)),
            SettingKind::IfLate => words(&DeadlineFallback::ALL.map(DeadlineFallback::as_str)),
            SettingKind::EnergySaving => words(&EnergySaving::ALL.map(EnergySaving::as_str)),
            SettingKind::TrafficRules => {
                "array of rules: `port 443 = free-only`, `dscp ef = any`".to_owned()
            }
            SettingKind::Span => "time: `2h`, `45m`".to_owned(),
            SettingKind::Size => "size: `50M`, `2G`".to_owned(),
            SettingKind::Listen => "loopback address: `127.0.0.1:1080`".to_owned(),
            SettingKind::Switch => words(&["true", "false"]),
            SettingKind::Path => "path; `~/` is the home directory".to_owned(),
            SettingKind::Day => "`1` to `31`".to_owned(),
            SettingKind::Cutoff => words(&["hard", "soft", "cautious"]),
            SettingKind::ApiKey => "key of the service".to_owned(),
            SettingKind::WebAddress => "address: `https://HOST/PATH`".to_owned(),
        }
    }
}

/// Checks names and addresses of proxies, separated by spaces.
fn check_proxies(text: &str) -> Result<(), String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    match words.len() {
        0 => return Err("a name or an address of a proxy is needed".to_owned()),
        count if count > SERVERS_MAX => return Err(ServerListError::TooMany(count).to_string()),
        _ => {}
    }
    for word in words {
        if word.contains("://") {
            let address = word.parse::<ServerAddress>();
            address.map_err(|error| error.to_string())?;
        } else if !is_proxy_name(word) {
            return Err(format!(
                "`{word}` is neither a name nor an address of a proxy"
            ));
        }
    }
    Ok(())
}

/// Reads what happens at a cap.
///
/// # Errors
/// It is no such word.
pub fn parse_cutoff(text: &str) -> Result<CapCutoff, String> {
    let all = [CapCutoff::Hard, CapCutoff::Soft, CapCutoff::Cautious];
    let found = all.into_iter().find(|cutoff| cutoff.as_str() == text);
    found.ok_or_else(|| format!("`{text}` is not one of hard, soft, cautious"))
}

/// Whether a proxy may have this name: it must be a bare key of TOML, and no address.
pub fn is_proxy_name(text: &str) -> bool {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    (1..=64).contains(&text.len()) && text.chars().all(is_bare)
}

/// The rows of the table in `docs/settings.md`.
pub fn settings_table() -> String {
    let mut rows =
        String::from("| key | value | default | also | meaning |\n|---|---|---|---|---|\n");
    for setting in SETTINGS {
        let default = setting.default.map(|text| format!("`{text}`"));
        let also = [
            Some(setting.option).filter(|text| !text.is_empty()),
            setting.environment,
        ];
        let also: Vec<String> = also
            .into_iter()
            .flatten()
            .map(|text| format!("`{text}`"))
            .collect();
        rows += &format!(
            "| `{}` | {} | {} | {} | {} |\n",
            setting.key,
            setting.kind.describe(),
            default.unwrap_or_default(),
            also.join(", "),
            setting.meaning,
        );
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_a_value_that_may_be_set() {
        for setting in SETTINGS {
            if let Some(default) = setting.default {
                setting.kind.check(default).unwrap();
            }
        }
    }

    #[test]
    fn an_unknown_key_names_the_one_that_was_meant() {
        for (wrong, meant) in [
            ("transfer.polcy", "`transfer.policy`"),
            ("policy", "`transfer.policy`"),
            ("proxy.defualt", "`proxy.default`"),
            ("agent.metric", "`agent.metrics`"),
            ("netwrok", "`network`"),
        ] {
            let text = setting(wrong).unwrap_err();
            assert!(text.contains(meant), "{text}");
        }
        assert!(!setting("colour.of.the.sky").unwrap_err().contains("mean"));
    }

    #[test]
    fn values_that_make_no_sense_are_refused() {
        for (key, bad) in [
            ("transfer.policy", "sometimes"),
            ("transfer.within", "soon"),
            ("energy.save", "sometimes"),
            ("transfer.max_cell", "much"),
            ("agent.metrics", "0.0.0.0:9646"),
            ("agent.notifications", "yes"),
            ("budget.reset_day", "32"),
            ("proxy.default", "d2tp://h:1/k"),
            ("proxy.default", "my pröxy"),
            ("proxy.http", "proxy.example:3128"),
            ("podcasts.index_key", "two words"),
        ] {
            assert!(
                setting(key).unwrap().kind.check(bad).is_err(),
                "{key} {bad}"
            );
        }
    }

    #[test]
    fn the_page_of_settings_has_the_table_that_the_code_has() {
        let page = include_str!("../../../../docs/settings.md");
        let table = settings_table();
        assert!(
            page.contains(&table),
            "docs/settings.md needs this table:\n{table}"
        );
    }
}
