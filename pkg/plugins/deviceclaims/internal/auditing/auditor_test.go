// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package auditing

import (
	"strings"
	"testing"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
)

// A claim that 256 pods use has a description longer than an event.
func TestWhatTheAuditorTellsFitsIntoAnEvent(t *testing.T) {
	recorder := events.NewFakeRecorder(1)
	a := &Auditor{Events: recorder}
	for _, tc := range []struct {
		note string
		want int
	}{
		{strings.Repeat("x", maxEventNote), maxEventNote},
		{strings.Repeat("x", maxEventNote+1), maxEventNote},
		{strings.Repeat("…", maxEventNote/3+1), 3*((maxEventNote-3)/3) + 3},
	} {
		a.event(klog.Background(), &resourceapi.ResourceClaim{}, "DeviceHeldTwice", "%s", tc.note)
		got := strings.TrimPrefix(<-recorder.Events, "Warning DeviceHeldTwice ")
		if len(got) != tc.want || !utf8.ValidString(got) || (got != tc.note) != strings.HasSuffix(got, "...") {
			t.Errorf("of %d bytes %d are told: …%s", len(tc.note), len(got), got[len(got)-10:])
		}
	}
}
