//! What all pages share: the frame around them, and the answer that says why something was not done.

use std::sync::Arc;

use askama::Template;
use axum::response::{Html, IntoResponse, Response};
use cedos_text::escape_controls;
use http::StatusCode;

use super::super::state::Agent;
use crate::fetch::outcome::{TransferExit, TransferFailure};

/// What the page's handlers know.
#[derive(Clone)]
pub(super) struct PageContext {
    pub(super) agent: Arc<Agent>,
    /// The first part of all paths: a slash and the token.
    pub(super) base: Arc<str>,
}

/// A page in the navigation.
pub(super) struct PageSection {
    /// The path after the token and its slash.
    pub(super) path: &'static str,
    pub(super) title: &'static str,
}

/// The pages in the navigation.
pub(super) const SECTIONS: [PageSection; 3] = [
    PageSection {
        path: "",
        title: "Transfers",
    },
    PageSection {
        path: "podcasts",
        title: "Podcasts",
    },
    PageSection {
        path: "networks",
        title: "Networks and spending",
    },
];

/// The frame around a page.
pub(super) struct PageFrame {
    pub(super) base: Arc<str>,
    /// The path of the section that the page belongs to.
    pub(super) section: &'static str,
}

impl PageFrame {
    /// The pages in the navigation.
    pub(super) fn sections(&self) -> &'static [PageSection] {
        &SECTIONS
    }
}

/// A label and what it says of a thing.
pub(super) struct PageFact {
    pub(super) label: &'static str,
    pub(super) text: String,
}

impl PageFact {
    /// A fact; controls of other hosts' texts are made visible.
    pub(super) fn new(label: &'static str, text: &str) -> PageFact {
        PageFact {
            label,
            text: escape_controls(text).into_owned(),
        }
    }
}

#[derive(Template)]
#[template(path = "problem.html")]
struct ProblemPage {
    frame: PageFrame,
    reason: String,
}

/// Renders a template.
pub(super) fn html(template: &impl Template) -> Response {
    match template.render() {
        Ok(text) => Html(text).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot render a page");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// The page that says why something was not done.
pub(super) fn problem(context: &PageContext, failure: &TransferFailure) -> Response {
    let page = ProblemPage {
        frame: PageFrame {
            base: context.base.clone(),
            section: "",
        },
        reason: escape_controls(&failure.text).into_owned(),
    };
    let status = match failure.exit {
        TransferExit::Usage => StatusCode::BAD_REQUEST,
        _ => StatusCode::CONFLICT,
    };
    (status, html(&page)).into_response()
}
