// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// known are the messages that a scheduler may log at default verbosity; all else fails the run.
var known = []struct {
	severity string // I, W or E
	message  string // what it begins with
	why      string
}{
	{"E", "empty allow-list mapping supplied, ignoring.", "start: component-base has no way to restrict no labels of metrics in silence"},
	{"I", "MultiPoint plugin is explicitly re-configured; overriding", "start: the configuration puts plugins into an order"},
	{"I", "Starting Kubernetes Scheduler", "start"},
	{"I", "Golang settings", "start"},
	{"I", "Serving securely on ", "start"},
	{"I", "Starting RequestHeaderAuthRequestController", "start of the secure port"},
	{"I", "Starting controller", "start of the secure port: certificates that are read again when they change"},
	{"I", "Starting DynamicServingCertificateController", "start of the secure port"},
	{"I", "Waiting for caches to sync", "start of the secure port"},
	{"I", "Caches are synced", "start of the secure port"},
	{"I", "Attempting to acquire leader lease...", "start"},
	{"I", "Successfully acquired lease", "start"},
	{"I", "Allocated devices", "decision: devices were chosen for a claim"},
	{"I", "Reserved an allocated claim", "decision: a pod uses what a claim had already"},
	{"I", "Gave devices back", "decision: a pod could not be bound, as another scheduler, or an earlier process, was first"},
	{"I", "Gave a reservation back", "decision: a pod could not be bound with a claim that others use"},
	{"I", "Kept devices", "decision: what would have been taken back was not, because the pod may be bound"},
	{"I", "Evicted pod is gone", "decision: it was evicted for others"},
}

// logLine is klog's text format: severity, date, time, thread, file and line, message.
var logLine = regexp.MustCompile(`^([IWEF])\d{4} \S+\s+\d+ \S+\] (.*)$`)

// checkLogs reads the schedulers' logs and fails if there is anything in them that is not known.
func (b *bench) checkLogs() error {
	lines, strange := 0, []string{}
	for _, path := range b.logs {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		lines += strings.Count(string(text), "\n")
		strange = append(strange, strangeLines(string(text), b.planted)...)
	}
	b.say("%d lines in the schedulers' logs, %d of them are not what they start with or decide", lines, len(strange))
	if len(strange) == 0 {
		return nil
	}
	for _, line := range strange {
		b.say("  %s", line)
	}
	return fmt.Errorf("the schedulers' logs have %d lines that are no decisions", len(strange))
}

// strangeLines are those that may not be in a log. A line that was told because of the planted device must name it.
func strangeLines(log string, planted *plant) []string {
	var strange []string
	for line := range strings.Lines(log) {
		if line = strings.TrimRight(line, "\n"); line != "" && !isKnown(line, planted) {
			strange = append(strange, line)
		}
	}
	return strange
}

func isKnown(line string, planted *plant) bool {
	match := logLine.FindStringSubmatch(line)
	if match == nil {
		return false // not even a message: a stack trace, for example
	}
	severity, message := match[1], strings.TrimPrefix(match[2], `"`)
	if planted != nil && strings.Contains(message, planted.device) && strings.HasPrefix(message, "Device is ") {
		return true
	}
	for _, one := range known {
		if severity == one.severity && strings.HasPrefix(message, one.message) {
			return true
		}
	}
	return false
}
