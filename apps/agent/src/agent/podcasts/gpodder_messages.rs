//! Messages of the API of gpodder.net (version 2), as servers and apps write them.
//!
//! ```text
//!  {"podcast": "https://a.example/feed", "episode": "https://a.example/1.mp3", "device": "phone",
//!   "action": "play", "timestamp": "2026-11-26T07:30:00", "started": 0, "position": 120, "total": 500}
//! ```
//!
//! Programs write it differently: actions in capitals, -1 where there is no position, times with or without a zone.
//! What can be understood is read; an action that cannot is left out.

use cedos_readycast::{EpisodeActionKind, SyncAction};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde_json::{Map, Value, json};
use url::Url;

/// The maximum number of bytes of an address.
pub(super) const ADDRESS_BYTES_MAX: usize = 4_096; // a guess: signed addresses have a kilobyte

/// Longest position or length in seconds that is believed.
const SECONDS_MAX: u64 = 30 * 24 * 3_600; // a guess

/// An address of HTTP, as the library writes it.
pub(super) fn web_address(text: &str) -> Option<Url> {
    let text = text.trim();
    let mut url = (text.len() <= ADDRESS_BYTES_MAX).then(|| Url::parse(text).ok())??;
    let is_web = matches!(url.scheme(), "http" | "https") && url.host().is_some();
    // Nobody's password comes from another program.
    let _ = (url.set_username(""), url.set_password(None));
    is_web.then_some(url)
}

fn seconds_of(value: Option<&Value>) -> Option<u32> {
    let value = value?;
    let seconds = match value.as_str() {
        Some(text) => text.trim().parse().ok()?,
        None => value
            .as_u64()
            .or(value.as_f64().filter(|s| *s >= 0.0).map(|s| s as u64))?,
    };
    (seconds <= SECONDS_MAX).then_some(seconds as u32)
}

/// The time of an action; none if it cannot be read.
fn time_of(value: Option<&Value>) -> Option<Timestamp> {
    let value = value?;
    let Some(text) = value.as_str() else {
        let second = value
            .as_i64()
            .or_else(|| value.as_f64().map(|second| second as i64))?;
        return Timestamp::from_second(second).ok();
    };
    let text = text.trim();
    if let Ok(at) = text.parse::<Timestamp>() {
        return Some(at);
    }
    let local: DateTime = text.parse().ok()?;
    Some(local.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

/// An action of a message; none if it makes no sense. Without a time it is done `now`.
pub(super) fn read_action(value: &Value, now: Timestamp) -> Option<SyncAction> {
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let kind = EpisodeActionKind::from_word(text("action")?)?;
    let is_play = kind == EpisodeActionKind::Play;
    let seconds = |name: &str| seconds_of(value.get(name)).filter(|_| is_play);
    let guid = text("guid").filter(|guid| !guid.is_empty() && guid.len() <= ADDRESS_BYTES_MAX);
    Some(SyncAction {
        podcast: web_address(text("podcast")?)?,
        episode: web_address(text("episode")?)?,
        guid: guid.map(str::to_owned),
        device: text("device").unwrap_or_default().to_owned(),
        kind,
        happened_at: time_of(value.get("timestamp")).unwrap_or(now),
        started: seconds("started"),
        position: seconds("position"),
        total: seconds("total").filter(|total| *total > 0),
    })
}

/// An action as it is sent: under these addresses, from this device if it has none.
pub(super) fn action_json(
    action: &SyncAction,
    podcast: &Url,
    episode: &Url,
    device: &str,
) -> Value {
    let device = match action.device.as_str() {
        "" => device,
        known => known,
    };
    let time = action.happened_at.strftime("%Y-%m-%dT%H:%M:%S").to_string();
    let mut fields = Map::new();
    let mut add = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    add("podcast", podcast.as_str().into());
    add("episode", episode.as_str().into());
    add("action", action.kind.as_str().into());
    add("timestamp", time.into());
    if !device.is_empty() {
        add("device", device.into());
    }
    if let Some(guid) = &action.guid {
        add("guid", guid.as_str().into());
    }
    if let Some(position) = action.position {
        add("position", position.into());
        // The one is valid with the other only.
        if let Some(total) = action.total {
            add("started", action.started.unwrap_or(0).into());
            add("total", total.into());
        }
    }
    json!(fields)
}

/// The addresses of a list: each a text, or an object with `url` or `feed`.
pub(super) fn read_feeds(list: &Value) -> Vec<&str> {
    let entries = list.as_array().into_iter().flatten();
    entries
        .filter_map(|entry| {
            let named = || entry.get("url").or_else(|| entry.get("feed"));
            entry.as_str().or_else(|| named().and_then(Value::as_str))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Option<SyncAction> {
        read_action(&value, Timestamp::UNIX_EPOCH)
    }

    fn play(more: Value) -> Value {
        let mut value = json!({
            "podcast": "https://a.example/feed", "episode": "https://a.example/1.mp3", "action": "play",
        });
        let fields = more.as_object().expect("fields").clone();
        value.as_object_mut().expect("fields").extend(fields);
        value
    }

    #[test]
    fn actions_of_all_dialects_are_read() {
        for (timestamp, second) in [
            (json!("1970-01-02T00:00:01"), 86_401),
            (json!("1970-01-02T00:00:01Z"), 86_401),
            (json!("1970-01-02T01:00:01+01:00"), 86_401),
            (json!("1970-01-02T00:00:01.5"), 86_401),
            (json!(86_401), 86_401),
            (json!("yesterday"), 0),
        ] {
            let action = read(play(json!({"timestamp": timestamp, "action": "PLAY"})));
            assert_eq!(action.expect("an action").happened_at.as_second(), second);
        }
        let action = read(play(json!({"started": "5", "position": 10.9, "total": -1})));
        let action = action.expect("an action");
        assert_eq!(
            (action.started, action.position, action.total),
            (Some(5), Some(10), None)
        );
        let download = read(play(json!({"action": "download", "position": 7}))).expect("an action");
        assert_eq!(download.position, None);
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        for wrong in [
            json!({"action": "flattr"}),
            json!({"action": 7}),
            json!({"podcast": "file:///etc/passwd"}),
            json!({"episode": "not an address"}),
            json!({"episode": format!("https://a.example/{}", "x".repeat(ADDRESS_BYTES_MAX))}),
        ] {
            assert_eq!(read(play(wrong.clone())), None, "{wrong}");
        }
        for value in [json!(null), json!([]), json!("play"), json!({})] {
            assert_eq!(read(value.clone()), None, "{value}");
        }
        let position = read(play(json!({"position": u64::MAX, "total": 1e300})));
        assert_eq!(position.expect("an action").position, None);
    }

    #[test]
    fn what_is_written_is_read_again() {
        let action = read(play(json!({
            "timestamp": "2026-11-26T07:30:00", "started": 0, "position": 5, "total": 9, "guid": "g"
        })));
        let action = action.expect("an action");
        let written = action_json(&action, &action.podcast, &action.episode, "laptop");
        assert_eq!(written["timestamp"], "2026-11-26T07:30:00");
        assert_eq!(written["device"], "laptop");
        let again = read(written).expect("an action");
        assert_eq!(
            again,
            SyncAction {
                device: "laptop".to_owned(),
                ..action
            }
        );
    }

    #[test]
    fn lists_of_feeds_are_texts_or_objects() {
        let list = json!(["a", {"url": "b"}, {"feed": "c"}, {"x": 1}, 7]);
        assert_eq!(read_feeds(&list), ["a", "b", "c"]);
        assert!(read_feeds(&json!({"a": 1})).is_empty());
    }
}
