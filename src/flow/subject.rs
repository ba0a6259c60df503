//! NATS subjects and filters: tokens between dots; in a filter `*` stands for one token and a last `>` for one or more.

/// Whether every subject that matches `narrow` matches `wide` too. A subject is a filter that matches itself alone.
pub fn covers(wide: &str, narrow: &str) -> bool {
    let mut tokens = narrow.split('.');
    for wanted in wide.split('.') {
        let Some(token) = tokens.next() else { return false };
        let is_covered = match wanted {
            ">" => return true,
            // Any one token, but not several.
            "*" => token != ">",
            _ => wanted == token,
        };
        if !is_covered {
            return false;
        }
    }
    tokens.next().is_none()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn matches_as_nats_does() {
        for (filter, subject) in [
            ("a.b", "a.b"),
            ("*.b", "a.b"),
            ("a.*", "a.b"),
            ("a.>", "a.b"),
            ("a.>", "a.b.c"),
            (">", "a"),
            ("a.*.>", "a.b.c"),
        ] {
            assert!(covers(filter, subject), "{filter} {subject}");
        }
        for (filter, subject) in
            [("a.b", "a"), ("a", "a.b"), ("a.*", "a"), ("a.>", "a"), ("*", "a.b"), ("a.*.>", "a.b"), ("A", "a")]
        {
            assert!(!covers(filter, subject), "{filter} {subject}");
        }
    }

    #[test]
    fn covers_what_is_narrower() {
        for (wide, narrow) in [
            (">", "outbox.*.>"),
            ("outbox.>", "outbox.*.>"),
            ("outbox.*.>", "outbox.*.>"),
            ("*.*", "a.*"),
            ("a.*", "a.b"),
            ("a.>", "a.*"),
            (">", ">"),
        ] {
            assert!(covers(wide, narrow), "{wide} {narrow}");
        }
        for (wide, narrow) in [
            ("outbox.*.*", "outbox.*.>"),
            ("outbox.orders.>", "outbox.*.>"),
            ("outbox.*.>", "outbox.>"),
            ("a.b", "a.*"),
            ("*", ">"),
            ("a.>", "a"),
            ("a", "a.b"),
        ] {
            assert!(!covers(wide, narrow), "{wide} {narrow}");
        }
    }

    proptest! {
        /// `covers` against its definition, on every subject of up to four tokens out of two.
        #[test]
        fn covers_means_matching_more(
            wide in "(a|b|[*])([.](a|b|[*])){0,2}([.]>)?|>",
            narrow in "(a|b|[*])([.](a|b|[*])){0,2}([.]>)?|>",
        ) {
            let mut subjects = vec![String::from("a"), String::from("b"), String::from("c")];
            for _ in 0..4 {
                let longer: Vec<_> = subjects.iter().flat_map(|s| ["a", "b", "c"].map(|t| format!("{s}.{t}"))).collect();
                subjects.extend(longer);
                subjects.sort();
                subjects.dedup();
            }
            let matches = |filter: &str, subject: &str| {
                let (filter, subject): (Vec<_>, Vec<_>) = (filter.split('.').collect(), subject.split('.').collect());
                let is_open = filter.last() == Some(&">");
                let fixed = filter.len() - usize::from(is_open);
                (if is_open { subject.len() > fixed } else { subject.len() == fixed })
                    && filter.iter().take(fixed).zip(&subject).all(|(wanted, token)| ["*", token].contains(wanted))
            };
            let more = subjects.iter().all(|s| !matches(&narrow, s) || matches(&wide, s));
            prop_assert_eq!(covers(&wide, &narrow), more);
        }
    }
}
