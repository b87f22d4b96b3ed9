// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// A status that the API server does not take is counted each time, is logged once for each reason, and is tried again whatever the
// reason, because a missing right may be granted.
func TestAStatusThatIsNotTakenIsSaidOnce(t *testing.T) {
	registerMetrics()
	d := newDesk(t)
	log := &strings.Builder{}
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log), textlogger.Verbosity(0))))
	var refusal error
	d.client.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return refusal != nil, nil, refusal
	})
	claims := resourceapi.Resource("resourceclaims")
	forbidden := apierrors.NewForbidden(claims, "train", errors.New("no right to patch"))
	invalid := apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), "train", nil)
	claim := ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}
	d.prepared()
	d.reporter.queue.Get()
	for _, step := range []struct {
		name    string
		refusal error
		reason  string
		logged  string // a part of the only line, "" for none
	}{
		{"forbidden", forbidden, "forbidden", `"Status of the claim's devices cannot be written, trying again" err="write the status of the devices of claim default/train: ` +
			`resourceclaims.resource.k8s.io \"train\" is forbidden: no right to patch" logger="UnhandledError" claim="default/train"`},
		{"still forbidden", forbidden, "forbidden", ""},
		{"invalid", invalid, "invalid", "is invalid"},
		{"away", errors.New("the API server is away"), "other", "is away"},
		{"still away", errors.New("the API server is away"), "other", ""},
		{"taken", nil, "", ""},
	} {
		log.Reset()
		refusal = step.refusal
		before := 0.0
		if step.reason != "" {
			before, _ = testutil.GetCounterMetricValue(statusErrors.WithLabelValues(step.reason))
		}
		d.reporter.process(ctx, claim)
		if step.reason == "" {
			if n := d.reporter.queue.NumRequeues(claim); n != 0 || len(d.reporter.refused) != 0 {
				t.Errorf("%s: %d requeues, refused %v", step.name, n, d.reporter.refused)
			}
			continue
		}
		if n, _ := testutil.GetCounterMetricValue(statusErrors.WithLabelValues(step.reason)); n != before+1 {
			t.Errorf("%s: counted %v, want %v", step.name, n, before+1)
		}
		if d.reporter.queue.NumRequeues(claim) == 0 {
			t.Errorf("%s: it is not tried again", step.name)
		}
		if lines := strings.Count(log.String(), "\n"); lines != min(1, len(step.logged)) || !strings.Contains(log.String(), step.logged) {
			t.Errorf("%s: %d lines in the log, want one with %q:\n%s", step.name, lines, step.logged, log)
		}
	}
	if told := d.told(); len(told) != 3 {
		t.Errorf("the claim's status is %q, want both devices", told)
	}
}

// A message that is longer than the API allows is cut, and stays text.
func TestALongMessageIsCutBetweenCharacters(t *testing.T) {
	for _, message := range []string{strings.Repeat("x", maxConditionMessage), strings.Repeat("x", maxConditionMessage+1), strings.Repeat("é", maxConditionMessage)} {
		d := newDesk(t)
		var status resourceapi.AllocatedDeviceStatus
		d.reporter.set(d.claim, &status, ConditionReady, metav1.ConditionFalse, reasonHeld, message)
		got := status.Conditions[0].Message
		if len(got) > maxConditionMessage || len(got) < maxConditionMessage-3 || !utf8.ValidString(got) {
			t.Errorf("a message of %d bytes became one of %d, valid: %t", len(message), len(got), utf8.ValidString(got))
		}
		if cut := strings.HasSuffix(got, "..."); cut != (len(message) > maxConditionMessage) {
			t.Errorf("a message of %d bytes was cut: %t", len(message), cut)
		}
	}
}
