// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/component-base/metrics/testutil"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// allowAll lets every caller read everything.
func allowAll(*http.Request) int { return http.StatusOK }

// scrape reads the agent's own metrics as Prometheus does: by name and by "label=value,…", a histogram as its count.
func (m *machine) scrape() (text string, metrics map[string]map[string]float64) {
	m.t.Helper()
	recorder := httptest.NewRecorder()
	m.last.Status().Handler(allowAll).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if recorder.Code != http.StatusOK {
		m.t.Fatalf("/metrics: %d: %s", recorder.Code, recorder.Body)
	}
	for line := range strings.Lines(recorder.Body.String()) {
		if strings.Contains(line, "stowage_agent_") {
			text += line
		}
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	must(m.t, err)
	metrics = map[string]map[string]float64{}
	for name, family := range families {
		values := map[string]float64{}
		for _, metric := range family.GetMetric() {
			var labels []string
			for _, label := range metric.GetLabel() {
				labels = append(labels, label.GetName()+"="+label.GetValue())
			}
			key := strings.Join(labels, ",")
			switch {
			case metric.GetHistogram() != nil:
				values[key] = float64(metric.GetHistogram().GetSampleCount())
			case metric.GetCounter() != nil:
				values[key] = metric.GetCounter().GetValue()
			default:
				values[key] = metric.GetGauge().GetValue()
			}
		}
		metrics[strings.TrimPrefix(name, "stowage_agent_")] = values
	}
	return text, metrics
}

// TestMetricsTellWhatPrepareAndUnprepareDo, step by step, in a scrape of the agent's own handler; what is told of a claim goes with it.
func TestMetricsTellWhatPrepareAndUnprepareDo(t *testing.T) {
	m := newMachine(t)
	m.run("")
	m.register(driver.Name + "-reg.sock")
	m.waitForGPUs(8)
	m.do(&nvmlsim.SetComputeMode{GPU: "0", Mode: nvmlsim.ComputeExclusiveProcess}) // which prepare changes
	_, before := m.scrape()
	since := func(name, labels string) float64 {
		t.Helper()
		_, now := m.scrape()
		return now[name][labels] - before[name][labels]
	}
	want := func(count float64, name, labels string) {
		t.Helper()
		if got := since(name, labels); got != count {
			t.Errorf("%s{%s} has grown by %v, want %v", name, labels, got, count)
		}
	}

	// 1. A claim that cannot be recorded.
	train := m.allocate("train", gpu0)
	m.disk.full.Store(true)
	if err := errorOf(m.prepare(train)); err == nil {
		t.Fatal("prepared on a full disk")
	}
	m.disk.full.Store(false)
	want(1, "step_duration_seconds", "operation=prepare,outcome=error,step=Record")
	want(0, "step_duration_seconds", "operation=prepare,outcome=ok,step=CDIFile")
	want(1, "call_duration_seconds", "operation=prepare,outcome=error")

	// 2. And then it can.
	must(t, errorOf(m.prepare(train)))
	for step, count := range map[string]float64{"Find": 2, "Decide": 2, "Record": 2, "CDIFile": 1, "Verify": 1, "ComputeMode": 1, "Processes": 0} {
		want(count, "step_duration_seconds", "operation=prepare,outcome=ok,step="+step)
	}
	want(1, "call_duration_seconds", "operation=prepare,outcome=ok")
	claimOf := "claim=train,device=" + gpu0 + ",gpu=" + gpu0 + ",namespace=default,pod_uid=train-pod-uid"
	want(1, "device_claim_info", claimOf)
	want(1, "ledger_claims", "state=completed")
	want(0, "device_use_seconds_total", "device="+gpu0)

	// 3. Released: its series are gone, its use is counted.
	must(t, m.unprepare(train))
	for step, count := range map[string]float64{"CDIFile": 1, "Processes": 1, "ComputeMode": 1, "Record": 2, "Find": 0} { // of the failure the record alone: no step was begun
		want(count, "step_duration_seconds", "operation=unprepare,outcome=ok,step="+step)
	}
	want(1, "call_duration_seconds", "operation=unprepare,outcome=ok")
	text, metrics := m.scrape()
	if strings.Contains(text, "train") {
		t.Error("a metric tells of a claim that is gone")
	}
	want(0, "ledger_claims", "state=completed")
	if used := since("device_use_seconds_total", "device="+gpu0); used <= 0 || used > 60 {
		t.Errorf("the device was in use for %v s", used)
	}

	// 4. All of them: known by name and labels, in Prometheus' conventions.
	labels := map[string]string{}
	for name, values := range metrics {
		for key := range values {
			var names []string
			for label := range strings.SplitSeq(key, ",") {
				of, _, _ := strings.Cut(label, "=")
				names = append(names, of)
			}
			labels[name] = strings.Join(names, ",")
		}
	}
	if diff := cmp.Diff(map[string]string{
		"call_duration_seconds":    "operation,outcome",
		"calls_in_flight":          "operation",
		"device_health":            "device,health",
		"device_use_seconds_total": "device",
		"gpu_ecc_errors_total":     "device,kind",
		"gpu_pcie_lanes":           "device",
		"gpus_of_unknown_use":      "",
		"gpu_power_watts":          "device",
		"gpu_temperature_celsius":  "device",
		"ledger_claims":            "state",
		"leftovers_released_total": "",
		"lock_wait_seconds":        "lock,outcome",
		"occupied_gpus":            "",
		"pool_generation":          "",
		"slice_gap_seconds":        "",
		"slices":                   "",
		"sockets_renewed_total":    "",
		"step_duration_seconds":    "operation,outcome,step",
		"stray_cdi_files":          "",
	}, labels, ignoreMissing("slice_errors_total", "claim_status_errors_total", "device_fault", "processes_without_claim")); diff != "" {
		t.Errorf("metrics and their labels (-want +got):\n%s", diff)
	}
	problems, err := testutil.NewPromLinter(strings.NewReader(text)).Lint()
	must(t, err)
	for _, problem := range problems {
		t.Errorf("%s: %s", problem.Metric, problem.Text)
	}
}

// ignoreMissing leaves metrics out that other tests of this process may have made.
func ignoreMissing(names ...string) cmp.Option {
	return cmp.FilterPath(func(p cmp.Path) bool {
		index, ok := p.Last().(cmp.MapIndex)
		return ok && slices.Contains(names, index.Key().String())
	}, cmp.Ignore())
}
