//! The answers to `cedos cast` as lines for people.

use cedos_agent::agent::api::PodcastRequest;
use cedos_agent::fetch::deadline_text::describe_time;
use cedos_agent::fetch::report::human_bytes;
use cedos_agent::transfer_text::promise_of;
use cedos_text::escape_controls;
use jiff::{Timestamp, Zoned};
use serde_json::Value;

/// The lines of an answer of the agent about podcasts, for people.
pub fn lines(request: &PodcastRequest, answer: &Value, now: &Zoned) -> Vec<String> {
    let list = |field: &str| answer[field].as_array().cloned().unwrap_or_default();
    match request {
        PodcastRequest::Search { .. } => list("found").iter().map(found).collect(),
        PodcastRequest::List { .. } => {
            let episodes = list("episodes");
            let episodes = episodes.iter().map(|e| episode(e, true, now));
            list("channels")
                .iter()
                .map(channel)
                .chain(episodes)
                .collect()
        }
        PodcastRequest::Add { .. } | PodcastRequest::Rule { .. } => {
            let mut line = channel(&answer["channel"]);
            if let Some(next) = time(&answer["next"]) {
                line += &format!("   next: {}", describe_time(next, now));
            }
            vec![line]
        }
        PodcastRequest::Show { .. } => {
            let episodes = list("episodes");
            let head = channel(&answer["channel"]["summary"]);
            let left_out = left_out(&answer["channel"]["skipped"]);
            let episodes = episodes.iter().map(|e| episode(e, false, now));
            let proposed = proposed(&answer["channel"]["summary"]["id"], &answer["proposal"]);
            std::iter::once(head)
                .chain(proposed)
                .chain(left_out)
                .chain(episodes)
                .collect()
        }
        PodcastRequest::Queue | PodcastRequest::UpNext { .. } => {
            let episodes = list("episodes");
            episodes.iter().map(|e| episode(e, true, now)).collect()
        }
        PodcastRequest::Continue => list("episodes").iter().map(begun).collect(),
        PodcastRequest::Refresh { .. } => list("channels").iter().map(refreshed).collect(),
        PodcastRequest::Import { .. } => {
            vec![format!("Subscribed: {}", answer["feeds"])]
        }
        PodcastRequest::Index { .. } => {
            vec![format!("Podcasts in the index: {}", answer["podcasts"])]
        }
        PodcastRequest::Backup { .. } => vec![text(&answer["file"])],
        PodcastRequest::Remove { .. } => {
            let title = text(&answer["channel"]["title"]);
            vec![match answer["files_removed"].as_u64().unwrap_or(0) {
                0 => format!("{title} is removed; none of its episodes was downloaded"),
                1 => format!("{title} is removed, with one downloaded episode"),
                files => format!("{title} is removed, with {files} downloaded episodes"),
            }]
        }
        PodcastRequest::Episode { .. } => described(&answer["episode"], now),
        PodcastRequest::Position { .. } => vec![position(&answer["episode"])],
        PodcastRequest::Played { .. }
        | PodcastRequest::NotWanted { .. }
        | PodcastRequest::Download { .. } => {
            vec![episode(&answer["episode"]["summary"], true, now)]
        }
        PodcastRequest::Export { .. }
        | PodcastRequest::Log { .. }
        | PodcastRequest::Begun { .. }
        | PodcastRequest::Next { .. }
        | PodcastRequest::Play { .. } => Vec::new(),
        PodcastRequest::Apps { .. } => vec![
            format!("Subscriptions (OPML)   {}", text(&answer["subscriptions"])),
            format!("Sync server            {}", text(&answer["server"])),
            format!("User                   {}", text(&answer["user"])),
            format!("Password               {}", text(&answer["password"])),
        ],
        PodcastRequest::AppsClose => {
            vec!["Other apps have no access any more".to_owned()]
        }
        PodcastRequest::Sync { .. } => synced(answer),
        PodcastRequest::SyncStatus => account(&answer["account"], now),
        PodcastRequest::SyncEnd if answer["was_set_up"] == false => {
            vec!["No server is set up".to_owned()]
        }
        PodcastRequest::SyncEnd => {
            vec!["Podcasts are no longer synced; what is here and at the server stays".to_owned()]
        }
    }
}

/// What an exchange with a server did.
fn synced(answer: &Value) -> Vec<String> {
    let report = &answer["report"];
    let ended = report["unsubscribed"].as_array().into_iter().flatten();
    let ended: Vec<String> = ended
        .map(|title| {
            format!(
                "{}: the subscription ended elsewhere, and here",
                text(title)
            )
        })
        .collect();
    let mut lines = vec![format!(
        "Synced with {}: {} new podcasts, {} positions; sent {} subscriptions, {} positions",
        text(&answer["account"]["server"]),
        report["subscribed"],
        report["actions_applied"],
        report["subscriptions_sent"],
        report["actions_sent"],
    )];
    lines.extend(ended);
    lines
}

/// The server that is set up.
fn account(account: &Value, now: &Zoned) -> Vec<String> {
    if account.is_null() {
        return vec!["No server is set up. `cedos cast sync URL --user NAME` names one".to_owned()];
    }
    let at = |field: &str| time(&account[field]).map(|at| describe_time(at, now));
    let mut line = format!(
        "{} as {}, device {}   last: {}",
        text(&account["server"]),
        text(&account["user"]),
        text(&account["device"]),
        at("synced_at").unwrap_or_else(|| "never".to_owned()),
    );
    if let Some(next) = at("next_sync_at") {
        line += &format!("   next: {next}");
    }
    if let Some(problem) = account["problem"].as_str() {
        line += &format!("   {}", escape_controls(problem));
    }
    vec![line]
}

/// Remarks on an answer of the agent about podcasts, such as that nothing was found.
pub fn notes(request: &PodcastRequest, answer: &Value) -> Vec<String> {
    let is_empty = |field: &str| answer[field].as_array().is_none_or(Vec::is_empty);
    match request {
        PodcastRequest::Search { .. } if is_empty("found") => {
            vec!["Nothing is found. Try other words, or `cedos cast add` with an address".into()]
        }
        PodcastRequest::List { words }
            if !words.trim().is_empty() && is_empty("channels") && is_empty("episodes") =>
        {
            vec![
                "No title here has these words. `cedos cast search WORDS` asks the directory"
                    .into(),
            ]
        }
        PodcastRequest::List { words } if words.trim().is_empty() && is_empty("channels") => {
            vec!["No podcasts yet. `cedos cast search WORDS` finds some, `cedos cast add URL` subscribes".into()]
        }
        PodcastRequest::Queue if is_empty("episodes") => {
            vec![
                "No episode is downloaded or ready. `cedos cast rule` sets when they are wanted"
                    .into(),
            ]
        }
        PodcastRequest::UpNext { .. } if is_empty("episodes") => {
            vec!["Nothing is ready or coming. `cedos cast next EPISODE` puts an episode here".into()]
        }
        PodcastRequest::Continue if is_empty("episodes") => {
            vec!["No episode was begun. `cedos cast play EPISODE` plays one".into()]
        }
        PodcastRequest::Add { .. } if answer["is_read_later"] == true => {
            vec!["note: no network is up; the feed is read when one is".into()]
        }
        PodcastRequest::Episode {
            transcript: true, ..
        } if answer["episode"]["transcript_passages"]
            .as_array()
            .is_none_or(Vec::is_empty) =>
        {
            let is_named = !answer["episode"]["transcript"].is_null();
            vec![match is_named {
                true => "note: its transcript is not here yet; it is being fetched".into(),
                false => "note: the feed names no transcript of it".into(),
            }]
        }
        PodcastRequest::Apps { .. } => vec![
            "note: an app that has your podcasts already, under their own addresses, syncs with the server's \
             address followed by /origins"
                .into(),
        ],
        PodcastRequest::Import { .. } | PodcastRequest::Sync { .. } => {
            let skipped = match request {
                PodcastRequest::Sync { .. } => &answer["report"]["skipped"],
                _ => &answer["skipped"],
            };
            let skipped = skipped.as_array().into_iter().flatten();
            skipped
                .map(|why| format!("note: left out: {}", text(why)))
                .collect()
        }
        _ => Vec::new(),
    }
}

fn text(value: &Value) -> String {
    escape_controls(value.as_str().unwrap_or_default()).into_owned()
}

fn time(value: &Value) -> Option<Timestamp> {
    value.as_str()?.parse().ok()
}

/// Hours, minutes and seconds as players show them.
pub fn clock(seconds: u64) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// Seconds of `1:02:03`, `12:34` or `754`.
pub fn parse_clock(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is no position: write 12:34, 1:02:03, or seconds");
    let parts: Vec<&str> = text.split(':').collect();
    if parts.len() > 3 {
        return Err(wrong());
    }
    parts.iter().enumerate().try_fold(0_u64, |sum, (at, part)| {
        let is_number = (1..=6).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        let number: u64 = part.parse().map_err(|_| wrong())?;
        let fits = is_number && (at == 0 || number < 60);
        fits.then_some(sum * 60 + number).ok_or_else(wrong)
    })
}

/// Season and number of an episode, as far as the feed says them.
fn numbers(episode: &Value) -> Option<String> {
    let (season, number) = (episode["season"].as_u64(), episode["number"].as_u64());
    match (season, number) {
        (Some(season), Some(number)) => Some(format!("S{season} E{number}")),
        (Some(season), None) => Some(format!("S{season}")),
        (None, Some(number)) => Some(format!("E{number}")),
        (None, None) => None,
    }
}

/// How far an episode was heard.
fn position(episode: &Value) -> String {
    let at = clock(episode["position_ms"].as_u64().unwrap_or(0) / 1000);
    let of = episode["duration_s"].as_u64();
    let of = of.map_or_else(String::new, |s| format!(" of {}", clock(s)));
    let played = match episode["played"] == true {
        true => "   played",
        false => "",
    };
    let title = text(&episode["title"]);
    format!("{}   {title}   {at}{of}{played}", episode["id"])
}

/// An episode that was begun: where it goes on, and what is left of it.
fn begun(episode: &Value) -> String {
    let heard_s = episode["position_ms"].as_u64().unwrap_or(0) / 1000;
    let left = episode["duration_s"].as_u64();
    let left = left.map_or_else(String::new, |of| {
        format!(", {} left", clock(of.saturating_sub(heard_s)))
    });
    format!(
        "{}   {} ({})   at {}{left}",
        episode["id"],
        text(&episode["title"]),
        text(&episode["channel_title"]),
        clock(heard_s)
    )
}

/// An episode with its notes, chapters and transcript.
fn described(whole: &Value, now: &Zoned) -> Vec<String> {
    let summary = &whole["summary"];
    let mut lines = vec![episode(summary, true, now)];
    if let Some(published) = time(&summary["published"]) {
        let published = published.to_zoned(now.time_zone().clone());
        lines.push(format!("Published   {}", published.strftime("%-d %b %Y")));
    }
    let of = summary["duration_s"].as_u64();
    let heard = summary["position_ms"].as_u64().unwrap_or(0) / 1000;
    lines.extend(of.map(|s| format!("Length      {}", clock(s))));
    if heard > 0 {
        lines.push(format!("Heard to    {}", clock(heard)));
    }
    for (label, field) in [("Page        ", "link"), ("File        ", "file")] {
        let value = text(&whole[field]);
        if !value.is_empty() {
            lines.push(format!("{label}{value}"));
        }
    }
    let section = |title: &str, of: Vec<String>| -> Vec<String> {
        match of.is_empty() {
            true => of,
            false => [String::new(), title.to_owned()]
                .into_iter()
                .chain(of)
                .collect(),
        }
    };
    let notes = whole["notes_text"].as_str().unwrap_or_default();
    let notes = notes.lines().map(|line| escape_controls(line).into_owned());
    lines.extend(section("Notes", notes.collect()));
    let list = |field: &str| whole[field].as_array().cloned().unwrap_or_default();
    let at = |part: &Value| part["start_s"].as_f64().map(|s| clock(s as u64));
    let chapters = list("chapters_listed");
    let chapters = chapters.iter().map(|chapter| {
        let link = text(&chapter["link"]);
        let link = (!link.is_empty()).then(|| format!(" ({link})"));
        format!(
            "{:>8}   {}{}",
            at(chapter).unwrap_or_default(),
            text(&chapter["title"]),
            link.unwrap_or_default()
        )
    });
    lines.extend(section("Chapters", chapters.collect()));
    let passages = list("transcript_passages");
    let passages = passages.iter().map(|passage| {
        let speaker = text(&passage["speaker"]);
        let speaker = (!speaker.is_empty()).then(|| format!("{speaker}: "));
        format!(
            "{:>8}   {}{}",
            at(passage).unwrap_or_default(),
            speaker.unwrap_or_default(),
            text(&passage["text"])
        )
    });
    lines.extend(section("Transcript", passages.collect()));
    lines
}

fn found(found: &Value) -> String {
    let author = text(&found["author"]);
    let by = (!author.is_empty()).then(|| format!(" ({author})"));
    let language = text(&found["language"]);
    let language = (!language.is_empty()).then(|| format!(" [{language}]"));
    format!(
        "{}   {}{}{}",
        text(&found["url"]),
        text(&found["title"]),
        by.unwrap_or_default(),
        language.unwrap_or_default()
    )
}

fn channel(channel: &Value) -> String {
    let mut line = format!(
        "{}   {}   {} episodes, {} not played, {} ready   {}",
        channel["id"],
        text(&channel["title"]),
        channel["episodes"],
        channel["unplayed"],
        channel["ready"],
        text(&channel["rule"]["schedule"]),
    );
    if let Some(problem) = channel["problem"].as_str() {
        line += &format!("   {}", escape_controls(problem));
    }
    line
}

/// What of a feed is not in the library; none if all is.
fn left_out(skipped: &Value) -> Option<String> {
    let reasons = [
        ("without_enclosure", "without audio or video"),
        ("duplicates", "with the identifier of a newer one"),
        ("beyond_limit", "older than those that are kept"),
    ];
    let reasons = reasons.into_iter().filter_map(|(field, words)| {
        let items = skipped[field].as_u64().filter(|items| *items > 0)?;
        Some(format!("{items} {words}"))
    });
    let reasons: Vec<String> = reasons.collect();
    (!reasons.is_empty()).then(|| format!("left out of the feed: items {}", reasons.join(", ")))
}

/// A rule that fits better how the channel is listened to, and how to set it.
fn proposed(channel: &Value, proposal: &Value) -> Option<String> {
    let schedule = text(&proposal["schedule"]);
    let (plays, met) = (proposal["plays"].as_u64()?, proposal["met"].as_u64()?);
    let hours = |field: &str| {
        proposal[field]
            .as_u64()
            .map(|s| format!("{:.1} h", s as f64 / 3_600.0))
    };
    let delay = hours("mean_delay_s")?;
    let now = match (hours("mean_delay_now_s"), proposal["met_now"].as_u64()) {
        (Some(now), Some(met)) => format!("the present rule {now}, in time for {met}"),
        _ => "the present rule has no deadline".to_owned(),
    };
    Some(format!(
        "proposal: {schedule}   in time for {met} of the last {plays} plays, leaves {delay} for free networks ({now})   \
         cedos cast rule {channel} {schedule}"
    ))
}

fn refreshed(channel: &Value) -> String {
    let title = text(&channel["title"]);
    let report = &channel["report"];
    match (report.is_null(), report["problem"].as_str()) {
        (true, _) => format!("{title}: not read now; no network is up that may be used"),
        (_, Some(problem)) => format!("{title}: {}", escape_controls(problem)),
        (_, None) => format!("{title}: {} new episodes", report["added"]),
    }
}

/// An episode in a list; `is_mixed`: among those of other channels.
fn episode(episode: &Value, is_mixed: bool, now: &Zoned) -> String {
    let mut line = format!("{}   {}", episode["id"], text(&episode["title"]));
    if let Some(numbers) = numbers(episode) {
        line += &format!("   {numbers}");
    }
    if is_mixed {
        line += &format!(" ({})", text(&episode["channel_title"]));
    }
    if let Some(bytes) = episode["bytes"].as_u64().filter(|bytes| *bytes > 0) {
        line += &format!("   {}", human_bytes(bytes));
    }
    line += &format!("   {}", text(&episode["state"]).to_uppercase());
    if episode["played"] == true {
        line += ", played";
    }
    if let Some(problem) = episode["problem"].as_str() {
        line += &format!(": {}", escape_controls(problem));
    }
    let transfer = &episode["transfer"];
    if transfer.is_null() {
        return line;
    }
    if let Some(at) = time(&episode["deadline"]) {
        line += &format!("   by {}", describe_time(at, now));
    }
    if let Some(promise) = promise_of(transfer) {
        line += &format!(", {}", promise.describe());
    }
    if transfer["standing"] == "waiting"
        && let Some(why) = transfer["last"]["why"].as_str()
    {
        line += &format!("   waits: {why} (cedos why {})", transfer["id"]);
    }
    line
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_proposal_has_its_reason_and_the_command_that_sets_it() {
        let now: Zoned = "2030-06-03T06:00:00[UTC]".parse().expect("a time");
        let mut answer = json!({"episodes": [], "channel": {"summary": {"id": 3, "title": "News"}}, "proposal": {
            "schedule": "weekdays 07:30", "plays": 9, "met": 9, "met_now": 4, "mean_delay_s": 48_600,
            "mean_delay_now_s": 3_600,
        }});
        let request = PodcastRequest::Show {
            channel: "3".into(),
            limit: 1,
        };
        let told = lines(&request, &answer, &now);
        let proposal = &told[1];
        for part in [
            "9 of the last 9",
            "13.5 h",
            "1.0 h, in time for 4",
            "cedos cast rule 3 weekdays 07:30",
        ] {
            assert!(proposal.contains(part), "{part}: {proposal}");
        }
        answer["proposal"] = Value::Null;
        assert_eq!(lines(&request, &answer, &now).len(), 1);
    }

    #[test]
    fn positions_are_read_as_players_show_them() {
        for (text, seconds) in [("754", 754), ("12:34", 754), ("1:02:03", 3_723), ("0", 0)] {
            assert_eq!(parse_clock(text), Ok(seconds), "{text}");
        }
        assert_eq!(clock(754), "12:34");
        assert_eq!(clock(3_723), "1:02:03");
        for wrong in [
            "",
            "12:",
            ":5",
            "1:60",
            "-1",
            "+1",
            "1:2:3:4",
            "99999999999",
        ] {
            assert!(parse_clock(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_episode_is_shown_with_notes_chapters_and_transcript() {
        let now: Zoned = "2030-06-03T06:00:00[UTC]".parse().expect("a time");
        let answer = json!({"episode": {
            "summary": {"id": 17, "title": "One", "channel_title": "News", "season": 2, "number": 5, "state": "new",
                "published": "2030-06-01T07:30:00Z", "duration_s": 3_723, "position_ms": 754_000, "played": false},
            "link": "https://a.example/one", "file": null, "transcript": "https://a.example/one.vtt",
            "notes_text": "First\u{1b}\nSecond",
            "chapters_listed": [{"start_s": 0.0, "title": "Opening", "link": null}],
            "transcript_passages": [{"start_s": 12.5, "speaker": "Ada", "text": "Good evening."}],
        }});
        let request = PodcastRequest::Episode {
            episode: cedos_readycast::EpisodeId(17),
            transcript: true,
        };
        let shown = lines(&request, &answer, &now).join("\n");
        for part in [
            "S2 E5",
            "1 Jun 2030",
            "1:02:03",
            "Heard to    12:34",
            "https://a.example/one",
            "Second",
            "0:00   Opening",
            "0:12   Ada: Good evening.",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(!shown.contains('\u{1b}'), "{shown}");
        assert!(notes(&request, &answer).is_empty());
    }

    #[test]
    fn an_episode_that_waits_says_by_when_and_why() {
        let now: Zoned = "2030-06-03T06:00:00[UTC]".parse().expect("a time");
        let answer = json!({"episodes": [{
            "id": 17, "title": "One\u{1b}", "channel_title": "News", "bytes": 12_000_000, "state": "downloading",
            "played": false, "deadline": "2030-06-03T07:30:00Z",
            "transfer": {"id": 4, "standing": "waiting", "last": {"why": "no free network is up"},
                "promise": {"p": 0.93, "infeasible": false, "metered_bytes_expected": 0, "metered_bytes_95": 0,
                    "metered_bytes_worst": 0, "left_s": 5400.0}},
        }]});
        let lines = lines(&PodcastRequest::Queue, &answer, &now);
        assert_eq!(lines.len(), 1);
        let line = &lines[0];
        for part in [
            "17",
            "(News)",
            "12.00 MB",
            "by 07:30",
            "93%",
            "waits: no free",
            "cedos why 4",
        ] {
            assert!(
                line.replace(' ', "").contains(&part.replace(' ', "")),
                "{part}: {line}"
            );
        }
        assert!(!line.contains('\u{1b}'), "{line}");
    }
}
