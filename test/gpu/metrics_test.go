// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/exporter"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// checkMetrics: the exporter reads each GPU twice, without a question that fails. What it says is in the log, for docs/simulation.md.
func checkMetrics(t *testing.T, n node) {
	hardware := driver.NewHardware(driver.HardwareOptions{Open: n.open, Clock: clock.RealClock{}})
	found, err := hardware.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	metrics := exporter.New(exporter.Options{
		NodeName: "node-1", Driver: driver.Name, GPUs: driver.NewReader(hardware), Clock: clock.RealClock{}, Interval: exporter.MinInterval,
		Kubelet: podresources.New(filepath.Join(t.TempDir(), "away.sock")),
		Claims:  func() ([]*ledger.Record, error) { return nil, nil },
	})
	var logged strings.Builder
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged))))
	scrape := func() string {
		began := time.Now()
		answer := httptest.NewRecorder()
		metrics.ServeHTTP(answer, httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics/gpus", nil))
		t.Logf("a scrape took %s", time.Since(began))
		return answer.Body.String()
	}
	first := scrape()
	time.Sleep(exporter.MinInterval) // a GPU is not read more often
	second := scrape()
	if strings.Contains(logged.String(), "not complete") {
		t.Errorf("questions fail: %s", logged.String())
	}
	for _, gpu := range found.GPUs {
		series := map[string]string{}
		for line := range strings.Lines(second) {
			if strings.Contains(line, `gpu="`+gpu.Name+`"`) {
				name, _, _ := strings.Cut(line, "{")
				series[name] += " " + strings.TrimSpace(line[strings.LastIndex(line, "} ")+2:])
			}
		}
		t.Logf("%s: %v", gpu.Name, series)
		for _, name := range []string{"memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts", "clock_hertz", "pcie_tx_bytes_per_second"} {
			if _, ok := series["stowage_gpu_"+name]; !ok && (gpu.MIG == nil || !strings.HasPrefix(name, "memory")) {
				t.Errorf("%s has no %s", gpu.Name, name)
			}
		}
	}
	if strings.Contains(first, "stowage_gpu_sm_util_ratio{") {
		t.Error("rates before there are two samples")
	}
}
