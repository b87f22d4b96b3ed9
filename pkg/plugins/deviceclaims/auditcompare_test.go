// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/auditing"
)

// inPages has the claims listed as the API server does it: in pages, and not if a request has a token and a version as well.
// Each answer is first offered to edit, which may return another error.
func inPages(h *harness, size int, edit func(page int) error) {
	h.client.PrependReactor("list", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		options := action.(clienttesting.ListActionImpl).ListOptions
		page := 0
		if options.Continue != "" {
			if options.ResourceVersion != "" || options.ResourceVersionMatch != "" {
				refusal := field.Forbidden(field.NewPath("resourceVersionMatch"), "resourceVersionMatch is forbidden when continue is provided")
				return true, nil, apierrors.NewInvalid(schema.GroupKind{Group: "meta.k8s.io", Kind: "ListOptions"}, "", field.ErrorList{refusal})
			}
			page, _ = strconv.Atoi(options.Continue)
		}
		if err := edit(page); err != nil {
			return true, nil, err
		}
		_, obj, err := h.api.react(action)
		if err != nil {
			return true, nil, err
		}
		list := obj.(*resourceapi.ResourceClaimList)
		slices.SortFunc(list.Items, func(a, b resourceapi.ResourceClaim) int { return cmp.Compare(a.Name, b.Name) })
		rest := list.Items[page*size:]
		list.Items = rest[:min(size, len(rest))]
		if len(rest) > size {
			list.Continue = strconv.Itoa(page + 1)
		}
		return true, list, nil
	})
}

func everyPage(int) error { return nil }

func comparisons(t *testing.T, result string) float64 {
	t.Helper()
	n, err := testutil.GetCounterMetricValue(auditing.ComparisonsTotal.WithLabelValues(result))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// With more claims than one page has, all pages are compared, the last one too.
func TestAuditorComparesAllPages(t *testing.T) {
	w := twoNodes()
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		w.claims = append(w.claims, claim(name))
	}
	h := newHarness(t, w)
	a := newTestAuditor(h, time.Minute)
	inPages(h, 2, everyPage)
	done := comparisons(t, "done")

	a.Compare(h.ctx)
	if got := comparisons(t, "done"); got != done+1 {
		t.Errorf("%v comparisons, want %v", got, done+1)
	}
	if events := a.told(); len(events) > 0 {
		t.Errorf("a false alarm: %q", events)
	}

	h.api.hold()
	h.api.create(claim("z"))
	a.Compare(h.ctx)
	if events := strings.Join(a.told(), "\n"); !strings.Contains(events, "differs from the API (missing): the API has version 106") {
		t.Errorf("nothing is told of the claim on the last page: %q", events)
	}
}

// A version that the API server does not keep any more is no failure: the comparison begins anew, with what is known by then. If that
// goes on it is one.
func TestAuditorBeginsAnewIfTheVersionHasExpired(t *testing.T) {
	for name, tc := range map[string]struct {
		expired int // requests for the second page
		want    string
	}{
		"once":                 {expired: 1, want: "done"},
		"as often as it tries": {expired: auditing.Attempts, want: "error"},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b"), claim("c")}
			h := newHarness(t, w)
			a := newTestAuditor(h, time.Minute)
			left, first := tc.expired, 0
			inPages(h, 2, func(page int) error {
				if page == 0 {
					first++
				} else if left > 0 {
					left--
					return apierrors.NewResourceExpired("The provided continue parameter is too old")
				}
				return nil
			})
			before := comparisons(t, tc.want)
			a.Compare(h.ctx)
			if got := comparisons(t, tc.want); got != before+1 {
				t.Errorf("%v comparisons with result %s, want %v", got, tc.want, before+1)
			}
			if want := min(tc.expired+1, auditing.Attempts); first != want {
				t.Errorf("%d lists were begun, want %d", first, want)
			}
		})
	}
}

// A comparison that cannot be made is counted each time, and logged when it begins, for each other reason, and when it is over.
func TestAuditorSaysThatItCannotCompare(t *testing.T) {
	h := newHarness(t, twoNodes())
	log := &strings.Builder{}
	h.ctx = klog.NewContext(h.ctx, textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log), textlogger.Verbosity(0))))
	a := newTestAuditor(h, 7*time.Minute)
	forbidden := apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "", errors.New("no"))
	for _, step := range []struct {
		name  string
		fault error
		want  string // a part of the only line, "" for no line
	}{
		{name: "all is well"},
		{name: "forbidden", fault: forbidden, want: `"Claims cannot be compared with the API, trying again every period" err="resourceclaims.resource.k8s.io is forbidden: no" ` +
			`resourceVersion="100" period="7m0s"`},
		{name: "still forbidden", fault: forbidden},
		{name: "a fault of the server", fault: errServer, want: "Claims cannot be compared with the API"},
		{name: "no answer", fault: errors.New("connection refused"), want: "Claims cannot be compared with the API"},
		{name: "again no answer", fault: errors.New("another text")},
		{name: "well again", want: `"Claims are compared with the API again" resourceVersion="100"`},
		{name: "still well"},
	} {
		log.Reset()
		a.clock.Step(time.Minute)
		h.api.onRequest(func(string) error { return step.fault })
		result, last := "done", a.clock.Now().Unix()
		if step.fault != nil {
			result = "error"
			value, _ := testutil.GetGaugeMetricValue(auditing.LastComparison)
			last = int64(value)
		}
		before := comparisons(t, result)
		a.Compare(h.ctx)
		if got := comparisons(t, result); got != before+1 {
			t.Errorf("%s: %v comparisons with result %s, want %v", step.name, got, result, before+1)
		}
		wantGauge(t, step.name+": the time of the last comparison", float64(last), func() (float64, error) {
			return testutil.GetGaugeMetricValue(auditing.LastComparison)
		})
		lines := strings.Count(log.String(), "\n")
		if want := min(len(step.want), 1); lines != want || !strings.Contains(log.String(), step.want) {
			t.Errorf("%s: %d lines in the log, want %d with %q:\n%s", step.name, lines, want, step.want, log)
		}
	}
}

// From the auditor's start on, the metrics say since when there has been no comparison, whether there is ever one or not.
func TestAuditorSaysSinceWhenThereIsNoComparison(t *testing.T) {
	for name, tc := range map[string]struct {
		period time.Duration
		want   func(started time.Time) int64
	}{
		"every minute": {period: time.Minute, want: time.Time.Unix},
		"never":        {want: func(time.Time) int64 { return 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, twoNodes())
			a := newTestAuditor(h, tc.period)
			auditing.LastComparison.Set(0)
			auditing.ComparisonPeriod.Set(0)
			h.cancel() // the claims are never known
			a.Run(h.ctx)
			wantGauge(t, "the time of the last comparison", float64(tc.want(a.clock.Now())), func() (float64, error) {
				return testutil.GetGaugeMetricValue(auditing.LastComparison)
			})
			wantGauge(t, "the period", tc.period.Seconds(), func() (float64, error) { return testutil.GetGaugeMetricValue(auditing.ComparisonPeriod) })
		})
	}
}
