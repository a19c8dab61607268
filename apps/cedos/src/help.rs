//! The parts of `--help` beside the options: two examples for each verb, and the verbs in groups.
//!
//! Clap groups options (`help_heading`), but not subcommands, so the overview is a template of its own. The
//! descriptions in it are those of the verbs.

use clap::Command;

/// The heading of options about deadlines, metered networks and priorities.
pub const COST_AND_TIME: &str = "Cost and time";
/// The heading of options about passwords, keys and certificates.
pub const TRUST: &str = "Credentials and trust";
/// The heading of options that most people never need.
pub const EXPERT: &str = "Expert options";

/// The verbs by what they are for.
const GROUPS: [(&str, &[&str]); 7] = [
    (
        "Transfers",
        &[
            "get", "put", "sync", "ls", "status", "why", "wait", "pause", "resume", "cancel",
            "retry", "edit", "page",
        ],
    ),
    ("Programs and players", &["run", "vpn", "url", "play"]),
    ("Podcasts", &["cast"]),
    ("Between two devices", &["send", "receive", "serve"]),
    (
        "This device",
        &[
            "join",
            "doctor",
            "net",
            "budget",
            "config",
            "agent",
            "key",
            "browser",
            "completions",
        ],
    ),
    ("A proxy of your own", &["prox", "bridge"]),
    ("Laboratory", &["demo", "lab", "sim", "repro", "bench"]),
];

/// Two command lines for each verb, by the words after `cedos`.
pub const EXAMPLES: &[(&str, [&str; 2])] = &[
    (
        "",
        [
            "cedos get https://example.org/film.mp4 --by 07:30",
            "cedos run -- ssh example.org",
        ],
    ),
    (
        "get",
        [
            "cedos get https://example.org/film.mp4 --by 07:30",
            "cedos get https://example.org/news.pdf -o news.pdf --every 07:30 --keep 7",
        ],
    ),
    (
        "put",
        [
            "cedos put photos.zip https://example.org/in/photos.zip --by 18:00",
            "cedos put report.pdf https://example.org/in --post --limit-rate 200k --detach",
        ],
    ),
    (
        "sync",
        [
            "cedos sync https://example.org/photos/ photos --by 07:30 --include '*.jpg'",
            "cedos sync d2tp://KEY/ mirror --delete --every 07:30",
        ],
    ),
    (
        "url",
        [
            "cedos url https://example.org/film.mp4",
            "cedos url https://example.org/live.m3u8 --policy free-only",
        ],
    ),
    (
        "play",
        [
            "cedos play https://example.org/film.mp4 -- mpv",
            "cedos play https://example.org/song.flac --max-cell 50M -- vlc {}",
        ],
    ),
    (
        "cast",
        ["cedos cast list", "cedos cast rule 3 weekdays 07:30"],
    ),
    (
        "cast add",
        [
            "cedos cast add https://example.org/feed.xml",
            "cedos cast add https://example.org/podcast --user me",
        ],
    ),
    (
        "cast search",
        [
            "cedos cast search morning news",
            "cedos cast search history --json",
        ],
    ),
    (
        "cast list",
        ["cedos cast list", "cedos cast list lighthouse"],
    ),
    (
        "cast show",
        [
            "cedos cast show 3",
            "cedos cast show morning news --limit 5",
        ],
    ),
    (
        "cast queue",
        ["cedos cast queue", "cedos cast queue --json"],
    ),
    (
        "cast next",
        ["cedos cast next 17", "cedos cast next 17 --down"],
    ),
    (
        "cast continue",
        ["cedos cast continue", "cedos cast continue --json"],
    ),
    (
        "cast play",
        ["cedos cast play", "cedos cast play 17 --policy free-only"],
    ),
    (
        "cast notes",
        ["cedos cast notes 17", "cedos cast notes 17 --transcript"],
    ),
    (
        "cast position",
        ["cedos cast position 17", "cedos cast position 17 12:34"],
    ),
    (
        "cast cancel",
        ["cedos cast cancel 17", "cedos cast cancel 17 --json"],
    ),
    (
        "cast rule",
        [
            "cedos cast rule 3 weekdays 07:30 --keep 5",
            "cedos cast rule news whenever it is free",
        ],
    ),
    (
        "cast opml",
        [
            "cedos cast opml import podcasts.opml",
            "cedos cast opml export podcasts.opml",
        ],
    ),
    (
        "cast opml import",
        [
            "cedos cast opml import podcasts.opml",
            "cedos cast opml import podcasts.opml --json",
        ],
    ),
    (
        "cast opml export",
        [
            "cedos cast opml export",
            "cedos cast opml export podcasts.opml",
        ],
    ),
    (
        "cast index",
        [
            "cedos cast index podcastindex_feeds.db.tgz",
            "cedos cast index https://public.podcastindex.org/podcastindex_feeds.db.tgz",
        ],
    ),
    (
        "cast backup",
        [
            "cedos cast backup podcasts.sqlite",
            "cedos cast backup podcasts.sqlite --json",
        ],
    ),
    (
        "cast log",
        ["cedos cast log --since 7d", "cedos cast log --summary"],
    ),
    (
        "cast export",
        [
            "cedos cast export log.json",
            "cedos cast export log.json --anonymous",
        ],
    ),
    (
        "cast apps",
        ["cedos cast apps", "cedos cast apps --new-links"],
    ),
    (
        "cast sync",
        [
            "cedos cast sync https://sync.example.org --user me",
            "cedos cast sync --status",
        ],
    ),
    (
        "cast refresh",
        ["cedos cast refresh", "cedos cast refresh 3"],
    ),
    (
        "cast remove",
        ["cedos cast remove 3", "cedos cast remove morning news"],
    ),
    (
        "cast played",
        ["cedos cast played 17", "cedos cast played 17 --not"],
    ),
    (
        "cast download",
        [
            "cedos cast download 17 --by 07:30",
            "cedos cast download 17 --policy free-only",
        ],
    ),
    ("ls", ["cedos ls", "cedos ls --clear"]),
    ("status", ["cedos status 3", "cedos status 3 --json"]),
    ("why", ["cedos why 3", "cedos why 3 --json"]),
    ("pause", ["cedos pause 3", "cedos pause 3 4"]),
    ("resume", ["cedos resume 3", "cedos resume 3 4"]),
    ("cancel", ["cedos cancel 3", "cedos cancel 3 4"]),
    ("retry", ["cedos retry 3", "cedos retry 3 4"]),
    (
        "edit",
        [
            "cedos edit 3 --by 18:00",
            "cedos edit 3 --policy any --max-cell 200M",
        ],
    ),
    ("wait", ["cedos wait", "cedos wait 3"]),
    ("page", ["cedos page", "cedos page --open"]),
    ("browser", ["cedos browser install", "cedos browser remove"]),
    (
        "browser install",
        ["cedos browser install", "cedos browser install --json"],
    ),
    (
        "browser remove",
        ["cedos browser remove", "cedos browser remove --json"],
    ),
    ("net", ["cedos net", "cedos net set wwan0 metered"]),
    ("net ls", ["cedos net ls", "cedos net ls --json"]),
    ("net watch", ["cedos net watch", "cedos net watch --json"]),
    (
        "net contacts",
        ["cedos net contacts", "cedos net contacts --json"],
    ),
    (
        "net set",
        ["cedos net set wlan0 metered", "cedos net set Train auto"],
    ),
    ("budget", ["cedos budget", "cedos budget set 2G"]),
    (
        "budget show",
        ["cedos budget show", "cedos budget show --json"],
    ),
    (
        "budget set",
        [
            "cedos budget set 2G --reset-day 14",
            "cedos budget set none",
        ],
    ),
    (
        "agent",
        [
            "cedos agent --install",
            "cedos agent --link wwan*=metered --when-free notify-send",
        ],
    ),
    (
        "prox",
        [
            "cedos prox",
            "cedos prox --state-dir /srv/prox --listen [::]:443",
        ],
    ),
    (
        "bridge",
        [
            "cedos bridge --serial /dev/ttyUSB0 --prox proxy.example.org",
            "cedos bridge --serial /dev/ttyACM0 --baud 9600 --kiss N0CALL-1 --poll --prox 192.0.2.1:4433",
        ],
    ),
    (
        "serve",
        [
            "cedos serve music --allow-any-client",
            "cedos serve music --prox d2tp://example.org:4433/KEY --allow-client KEY",
        ],
    ),
    (
        "prox invite",
        ["cedos prox invite --for laptop", "cedos prox invite --list"],
    ),
    (
        "prox reload",
        ["cedos prox reload", "cedos prox reload --json"],
    ),
    (
        "prox drain",
        [
            "cedos prox drain",
            "cedos prox drain --to 192.0.2.2:4433 --within 5m",
        ],
    ),
    (
        "prox status",
        ["cedos prox status", "cedos prox status --json"],
    ),
    (
        "prox feeds",
        [
            "cedos prox feeds phone --opml subscriptions.opml -o phone.opml",
            "cedos prox feeds phone https://example.org/feed",
        ],
    ),
    (
        "prox client",
        ["cedos prox client list", "cedos prox client remove laptop"],
    ),
    (
        "prox client list",
        ["cedos prox client list", "cedos prox client list --json"],
    ),
    (
        "prox client show",
        [
            "cedos prox client show laptop",
            "cedos prox client show laptop --json",
        ],
    ),
    (
        "prox client rename",
        [
            "cedos prox client rename laptop old-laptop",
            "cedos prox client rename KEY phone",
        ],
    ),
    (
        "prox client limit",
        [
            "cedos prox client limit laptop --down 2M --month 100G",
            "cedos prox client limit laptop --reset",
        ],
    ),
    (
        "prox client remove",
        [
            "cedos prox client remove laptop",
            "cedos prox client remove KEY",
        ],
    ),
    (
        "join",
        [
            "cedos join -",
            "cedos join d2tp://example.org:4433/KEY#SECRET",
        ],
    ),
    ("doctor", ["cedos doctor", "cedos doctor --json"]),
    (
        "config",
        ["cedos config", "cedos config set transfer.policy free-only"],
    ),
    (
        "config show",
        ["cedos config show", "cedos config show transfer.policy"],
    ),
    (
        "config set",
        [
            "cedos config set transfer.policy free-only",
            "cedos config set proxies.home d2tp://example.org:4433/KEY",
        ],
    ),
    (
        "config unset",
        [
            "cedos config unset transfer.policy",
            "cedos config unset proxies.home",
        ],
    ),
    (
        "config edit",
        ["cedos config edit", "EDITOR=nano cedos config edit"],
    ),
    (
        "config check",
        ["cedos config check", "cedos config check config.toml"],
    ),
    (
        "send",
        ["cedos send film.mp4", "cedos send film.mp4 --within 1h"],
    ),
    (
        "receive",
        [
            "cedos receive 4271-tulip-hazel-canoe",
            "cedos receive 4271-tulip-hazel-canoe -o films",
        ],
    ),
    (
        "completions",
        ["cedos completions bash", "cedos completions fish"],
    ),
    (
        "run",
        [
            "cedos run -- ssh example.org",
            "cedos run --policy free-only -- rsync -a photos example.org:",
        ],
    ),
    ("vpn", ["cedos vpn up", "cedos vpn status"]),
    (
        "vpn up",
        [
            "cedos vpn up",
            "cedos vpn up --exclude 192.168.0.0/16 --kill-switch",
        ],
    ),
    (
        "vpn down",
        [
            "cedos vpn down",
            "cedos vpn down --state-dir /run/other-vpn",
        ],
    ),
    (
        "vpn status",
        ["cedos vpn status", "cedos vpn status --json"],
    ),
    ("key", ["cedos key show", "cedos key gen -o prox.key"]),
    ("key gen", ["cedos key gen", "cedos key gen -o prox.key"]),
    ("key show", ["cedos key show", "cedos key show prox.key"]),
    ("demo", ["cedos demo", "cedos demo --json"]),
    (
        "lab",
        [
            "cedos lab run train.toml",
            "cedos lab run train.toml --json",
        ],
    ),
    (
        "lab run",
        [
            "cedos lab run train.toml --client get",
            "cedos lab run train.toml -- curl -O http://origin/",
        ],
    ),
    (
        "lab kill",
        [
            "cedos lab kill --points 200",
            "cedos lab kill --points 20 --fault power",
        ],
    ),
    (
        "sim",
        [
            "cedos sim run train.toml",
            "cedos sim run train.toml --json",
        ],
    ),
    (
        "sim run",
        [
            "cedos sim run train.toml --log train.log",
            "cedos sim run train.toml --seed 7 --json",
        ],
    ),
    (
        "sim fuzz",
        [
            "cedos sim fuzz --seeds 1000",
            "cedos sim fuzz --seeds 1 --first 4711 --salt 3 --keep found",
        ],
    ),
    (
        "sim vary",
        [
            "cedos sim vary train.toml --seeds 1000",
            "cedos sim vary train.toml --first 4711 --seeds 1",
        ],
    ),
    (
        "sim score",
        [
            "cedos sim score tram.csv --seed 100 --sets 16",
            "cedos sim score tram.csv --policy d2sched --json",
        ],
    ),
    (
        "sim foresee",
        [
            "cedos sim foresee monday.csv tuesday.csv",
            "cedos sim foresee monday.csv tuesday.csv wednesday.csv",
        ],
    ),
    ("repro", ["cedos repro", "cedos repro C1"]),
    (
        "bench",
        [
            "cedos bench throughput",
            "cedos bench throughput --net lo1500 --json",
        ],
    ),
];

/// Adds to each verb its examples, and to the overview the groups.
#[must_use]
pub fn with_examples_and_groups(command: Command) -> Command {
    let overview = overview(&command);
    with_examples(command, "").help_template(overview)
}

fn with_examples(mut command: Command, path: &str) -> Command {
    let names: Vec<String> = command
        .get_subcommands()
        .map(|verb| verb.get_name().to_owned())
        .collect();
    for name in names {
        let path = format!("{path} {name}");
        command = command.mut_subcommand(name, |verb| with_examples(verb, path.trim()));
    }
    // Those of the overview are for `cedos`, not for `cedos-lab`.
    let is_shown = !path.is_empty() || command.get_name() == "cedos";
    match EXAMPLES.iter().find(|(verb, _)| is_shown && *verb == path) {
        Some((_, [first, second])) => {
            command.before_help(format!("Examples:\n  {first}\n  {second}"))
        }
        None => command,
    }
}

/// The columns of the overview, as most terminals have them.
const COLUMNS: usize = 80;

/// Wraps text into lines of at most this many columns, if its words are not longer.
fn wrapped(text: &str, columns: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// The template of the overview: the verbs that are not hidden, by groups.
fn overview(command: &Command) -> String {
    let visible: Vec<&Command> = command
        .get_subcommands()
        .filter(|verb| !verb.is_hide_set())
        .collect();
    let widest = visible.iter().map(|verb| verb.get_name().len()).max();
    let width = widest.unwrap_or(0);
    let line = |verb: &Command| {
        let about = verb.get_about().map(ToString::to_string);
        let indent = width + 4;
        let about = wrapped(&about.unwrap_or_default(), COLUMNS - indent);
        let about = about.replace('\n', &format!("\n{:indent$}", ""));
        format!("  {:width$}  {about}\n", verb.get_name())
    };
    let mut text = "{before-help}{about-with-newline}\n{usage-heading} {usage}\n\n".to_owned();
    for (title, verbs) in GROUPS {
        let lines: String = verbs
            .iter()
            .filter_map(|name| visible.iter().find(|verb| verb.get_name() == *name))
            .map(|verb| line(verb))
            .collect();
        if !lines.is_empty() {
            text += &format!("{title}:\n{lines}\n");
        }
    }
    text + "Options:\n{options}{after-help}"
}

/// Verbs of a command that are in no group, or in several.
#[must_use]
pub fn ungrouped_verbs(command: &Command) -> Vec<String> {
    let count = |name: &str| {
        let verbs = GROUPS.iter().flat_map(|(_, verbs)| verbs.iter());
        verbs.filter(|verb| **verb == name).count()
    };
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    verbs
        .map(|verb| verb.get_name().to_owned())
        .filter(|name| count(name) != 1)
        .collect()
}

/// Verbs of a command, and verbs below them, for which there are no examples.
#[must_use]
pub fn verbs_without_examples(command: &Command) -> Vec<String> {
    fn collect(command: &Command, path: &str, missing: &mut Vec<String>) {
        for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let path = format!("{path} {}", verb.get_name());
            let path = path.trim();
            if !EXAMPLES.iter().any(|(known, _)| *known == path) {
                missing.push(path.to_owned());
            }
            collect(verb, path, missing);
        }
    }
    let mut missing = Vec::new();
    collect(command, "", &mut missing);
    missing
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::ProductVerb;

    #[derive(Debug, Parser)]
    #[command(name = "cedos")]
    struct Product {
        #[command(subcommand)]
        _verb: ProductVerb,
    }

    #[test]
    fn every_verb_is_in_one_group_and_has_two_examples() {
        let command = Product::command();
        assert_eq!(ungrouped_verbs(&command), [""; 0]);
        assert_eq!(verbs_without_examples(&command), [""; 0]);
    }

    #[test]
    fn every_example_of_a_product_verb_is_a_command_line_that_is_accepted() {
        let key = "A".repeat(43);
        let command = Product::command();
        for (verb, examples) in EXAMPLES {
            let first = verb.split(' ').next().unwrap_or_default();
            let is_product = command.find_subcommand(first).is_some() || first.is_empty();
            for example in examples.iter().filter(|_| is_product) {
                let words = example.replace("KEY", &key).replace("EDITOR=nano ", "");
                let read = Product::try_parse_from(words.split_whitespace());
                assert!(read.is_ok(), "{example}: {}", read.unwrap_err());
                let starts = format!("cedos {verb}");
                assert!(words.starts_with(starts.trim()), "{verb}: {example}");
            }
        }
    }

    #[test]
    fn expert_options_come_after_those_about_cost_and_credentials() {
        let mut command = Product::command();
        for verb in command.get_subcommands_mut() {
            let help = verb.render_long_help().to_string();
            let found =
                [COST_AND_TIME, TRUST, EXPERT].map(|title| help.find(&format!("\n{title}:\n")));
            let found: Vec<usize> = found.into_iter().flatten().collect();
            assert!(found.is_sorted(), "{help}");
        }
    }

    #[test]
    fn the_overview_lists_each_verb_once_under_its_group() {
        let mut command = with_examples_and_groups(Product::command());
        let help = command.render_help().to_string();
        assert!(help.starts_with("Examples:\n  cedos get"), "{help}");
        let transfers = help.find("Transfers:").expect("a group");
        let get = help.find("\n  get ").expect("get");
        let programs = help.find("Programs and players:").expect("a group");
        assert!(transfers < get && get < programs, "{help}");
        assert_eq!(help.matches("\n  get ").count(), 1);
        assert!(
            help.lines().all(|line| line.chars().count() <= 80),
            "{help}"
        );
    }
}
