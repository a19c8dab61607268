//! The settings file, by `cedos config` and by every verb that reads it; and `cedos doctor`.

use std::path::Path;

use cedos_lab_rig::program::{cedos, device_key, ended, run};

use crate::support::{Operator, join};

const ADDRESS: &str = "d2tp://192.0.2.1:4433/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc";

fn config_file(home: &Path) -> std::path::PathBuf {
    home.join(".config/cedos/config.toml")
}

#[tokio::test]
async fn show_says_where_each_value_is_from() {
    let home = tempfile::tempdir().unwrap();
    run(home.path(), &["config", "set", "transfer.within", "2h"])
        .await
        .ends_with(0, "changed");
    run(home.path(), &["config", "set", "proxies.home", ADDRESS])
        .await
        .ends_with(0, "changed");
    let command = cedos(home.path(), &["config", "show", "--json"])
        .env("CEDOS_PROX", "home")
        .spawn();
    let shown = ended(command.unwrap()).await;
    let of = |key: &str| {
        let mut all = shown.events.iter();
        let found = all.find(|event| event["key"] == key);
        found
            .unwrap_or_else(|| panic!("no {key}: {}", shown.errors))
            .clone()
    };
    assert_eq!(of("transfer.within")["value"], "2h");
    assert_eq!(of("transfer.within")["from"], "file");
    assert_eq!(of("transfer.policy")["from"], "default");
    assert_eq!(of("proxy.default")["value"], "home");
    assert_eq!(of("proxy.default")["from"], "environment");
    assert_eq!(of("proxies.home")["value"], ADDRESS);
    let source = of("transfer.within")["source"].as_str().unwrap().to_owned();
    assert_eq!(Path::new(&source), config_file(home.path()));
}

#[tokio::test]
async fn show_has_the_rules_for_networks_with_their_file() {
    let home = tempfile::tempdir().unwrap();
    let file = config_file(home.path());
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    let rule = "[[network]]\nssid = \"Train\"\nclass = \"metered\"\ncap = \"2G\"\nreset_day = 14\n";
    std::fs::write(&file, rule).unwrap();
    let shown = run(home.path(), &["config", "show", "--json"]).await;
    let rule = shown.events.iter().find(|event| event["key"] == "network");
    let rule = rule.unwrap_or_else(|| panic!("no rule: {:?}", shown.events));
    assert_eq!(rule["value"]["of"], "ssid Train");
    assert_eq!(rule["value"]["cap"], 2_000_000_000_u64);
    assert_eq!(rule["value"]["reset_day"], 14);
    assert_eq!(rule["from"], "file");
    assert_eq!(Path::new(rule["source"].as_str().unwrap()), file);
    let words = cedos(home.path(), &["config", "show"]).output().await;
    let words = String::from_utf8(words.unwrap().stdout).unwrap();
    let of = "network (ssid Train) = metered, cap 2.00 GB a month, reset_day 14, cutoff hard";
    assert!(
        words.contains(&format!("{of}  ({})", file.display())),
        "{words}"
    );
}

#[tokio::test]
async fn an_unknown_key_ends_with_two_and_names_the_nearest() {
    let home = tempfile::tempdir().unwrap();
    let set = run(home.path(), &["config", "set", "transfer.polcy", "any"]).await;
    set.ends_with(2, "do you mean `transfer.policy`?");
    let value = run(
        home.path(),
        &["config", "set", "transfer.policy", "sometimes"],
    )
    .await;
    value.ends_with(2, "free-first");
    let proxy = run(home.path(), &["config", "set", "proxy.default", "nobody"]).await;
    proxy.ends_with(2, "no proxy named `nobody`");
    assert!(!config_file(home.path()).exists());
    std::fs::create_dir_all(config_file(home.path()).parent().unwrap()).unwrap();
    std::fs::write(
        config_file(home.path()),
        "[agent]\nmetric = \"127.0.0.1:1\"\n",
    )
    .unwrap();
    for arguments in [
        &["config", "check"][..],
        &["config", "show"],
        &["get", "http://127.0.0.1:1/x", "--dry-run", "--offline"],
        &["url", "http://127.0.0.1:1/x"],
        &["agent"],
        &["run", "--", "true"],
    ] {
        let refused = run(home.path(), arguments).await;
        refused.ends_with(2, "`agent.metrics`");
        refused.ends_with(2, "config.toml");
    }
}

#[tokio::test]
async fn an_option_wins_over_the_environment_and_that_over_the_file() {
    let home = tempfile::tempdir().unwrap();
    let other = ADDRESS.replace("192.0.2.1", "192.0.2.2");
    let third = ADDRESS.replace("192.0.2.1", "192.0.2.3");
    for (key, value) in [
        ("proxies.home", ADDRESS),
        ("proxies.other", &other),
        ("proxy.default", "home"),
        ("transfer.within", "2h"),
    ] {
        run(home.path(), &["config", "set", key, value])
            .await
            .ends_with(0, "changed");
    }
    let plan = async |more: &[&str], variable: Option<&str>| {
        let always = [
            "get",
            "http://192.0.2.9/x",
            "--dry-run",
            "--offline",
            "--json",
        ];
        let mut command = cedos(home.path(), &[&always[..], more].concat());
        if let Some(text) = variable {
            command.env("CEDOS_PROX", text);
        }
        let planned = ended(command.spawn().unwrap()).await;
        assert_eq!(planned.code, 0, "{}", planned.errors);
        planned.last().clone()
    };
    let text = |plan: &serde_json::Value| plan.to_string();
    let file = plan(&[], None).await;
    assert!(text(&file).contains("192.0.2.1:4433"), "{file}");
    let within = |plan: &serde_json::Value, most: f64| {
        let left = plan["deadline_s"].as_f64().unwrap();
        assert!(left <= most && left > most - 600.0, "{plan}");
    };
    within(&file, 7_200.0);
    let variable = plan(&[], Some("other")).await;
    assert!(text(&variable).contains("192.0.2.2:4433"), "{variable}");
    let option = plan(&["--prox", &third, "--within", "3h"], Some("other")).await;
    assert!(text(&option).contains("192.0.2.3:4433"), "{option}");
    within(&option, 10_800.0);
    let none = plan(&["--no-prox"], Some("other")).await;
    assert!(!text(&none).contains("4433"), "{none}");
    let unknown = run(
        home.path(),
        &["get", "http://192.0.2.9/x", "--prox", "hmoe"],
    )
    .await;
    unknown.ends_with(2, "known are home, other");
}

#[tokio::test]
async fn edit_saves_what_makes_sense_and_nothing_else() {
    let home = tempfile::tempdir().unwrap();
    let edit = async |script: &str| {
        let mut command = cedos(home.path(), &["config", "edit"]);
        // As git does it: what $VISUAL holds is for the shell to read.
        let editor = format!("sh -c '{script}' sh");
        ended(command.env("VISUAL", editor).spawn().unwrap()).await
    };
    let saved = edit(r#"printf "[transfer]\nwithin = \"3h\"\n" > "$1""#).await;
    saved.ends_with(0, "saved");
    let text = std::fs::read_to_string(config_file(home.path())).unwrap();
    assert_eq!(text, "[transfer]\nwithin = \"3h\"\n");
    let refused = edit(r#"printf "[transfer]\nwithn = \"3h\"\n" > "$1""#).await;
    refused.ends_with(2, "not saved");
    edit("true").await.ends_with(0, "nothing changed");
    edit("false").await.ends_with(1, "nothing was saved");
    assert_eq!(
        std::fs::read_to_string(config_file(home.path())).unwrap(),
        text
    );
}

#[tokio::test]
async fn downloads_go_where_the_settings_say() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("Down loads");
    let set = [
        "config",
        "set",
        "directories.downloads",
        folder.to_str().unwrap(),
    ];
    run(home.path(), &set).await.ends_with(0, "changed");
    let planned = run(
        home.path(),
        &[
            "get",
            "http://192.0.2.9/song.mp3",
            "--dry-run",
            "--offline",
            "--json",
        ],
    )
    .await;
    assert_eq!(planned.code, 0, "{}", planned.errors);
    assert!(
        planned.last().to_string().contains("Down loads/song.mp3"),
        "{}",
        planned.last()
    );
}

#[tokio::test]
async fn doctor_says_what_works_and_what_to_do_about_what_does_not() {
    let operator = Operator::start().await;
    let home = tempfile::tempdir().unwrap();
    let check = |run: &cedos_lab_rig::program::CedosRun, name: &str| {
        let checks = run.last()["checks"].as_array().unwrap().clone();
        let found = checks.into_iter().find(|check| check["name"] == name);
        found.unwrap_or_else(|| panic!("no {name}: {}", run.last()))
    };
    let alone = run(home.path(), &["doctor", "--json"]).await;
    assert_eq!(check(&alone, "proxy")["status"], "note");
    device_key(home.path()).await;
    // Known, and not yet admitted.
    let address = &operator.proxy.address;
    let stranger = run(home.path(), &["doctor", "--json", "--prox", address]).await;
    assert_eq!(stranger.code, 1);
    assert_eq!(check(&stranger, "proxy over UDP")["status"], "good");
    let session = check(&stranger, "proxy session");
    assert_eq!(session["status"], "bad");
    assert!(
        session["advice"].as_str().unwrap().contains("cedos join"),
        "{session}"
    );
    join(home.path(), &operator.invite(&[]).await, &[])
        .await
        .ends_with(0, "enrolled");
    let member = run(home.path(), &["doctor", "--json"]).await;
    assert_eq!(check(&member, "proxy key")["status"], "good");
    let path = check(&member, "path");
    assert!(
        path["text"].as_str().unwrap().contains("bytes pass"),
        "{path}"
    );
    // Loopback carries larger packets than those that paths begin with.
    assert!(
        !path["text"]
            .as_str()
            .unwrap()
            .starts_with("packets of 1200 "),
        "{path}"
    );
    let wrong = format!("{}{}", address.rsplit_once('/').unwrap().0, &ADDRESS[21..]);
    let wrong = run(home.path(), &["doctor", "--json", "--prox", &wrong]).await;
    assert_eq!(check(&wrong, "proxy key")["status"], "bad");
    let gone = run(
        home.path(),
        &[
            "doctor",
            "--prox",
            &ADDRESS.replace("192.0.2.1", "127.0.0.1"),
        ],
    )
    .await;
    gone.ends_with(1, "nobody listens");
}
