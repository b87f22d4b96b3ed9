// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// TestMetricsOfGPUsAreForReadersAlone, on a path of their own: the others' handlers are as without them.
func TestMetricsOfGPUsAreForReadersAlone(t *testing.T) {
	say := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) })
	}
	handler := withGPUMetrics(say("others"), say("GPUs"), func(r *http.Request) int {
		if r.Header.Get("Authorization") == "Bearer reader" {
			return http.StatusOK
		}
		return http.StatusForbidden
	})
	for name, tc := range map[string]struct {
		path, token string
		code        int
		want        string
	}{
		"a reader":          {gpuMetricsPath, "reader", http.StatusOK, "GPUs"},
		"somebody else":     {gpuMetricsPath, "tenant", http.StatusForbidden, "Forbidden\n"},
		"the agent's own":   {"/metrics", "tenant", http.StatusOK, "others"},
		"a probe":           {"/readyz", "", http.StatusOK, "others"},
		"a path below both": {gpuMetricsPath + "/", "reader", http.StatusOK, "others"},
	} {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, reading("10.0.0.1", "", tc.path, tc.token))
		if answer.Code != tc.code || answer.Body.String() != tc.want {
			t.Errorf("%s: %d %q, want %d %q", name, answer.Code, answer.Body, tc.code, tc.want)
		}
	}
}

// TestMetricsOfGPUsAreServedToWhomTheAPIServerLets: over TLS, and not for the right to read /metrics alone.
func TestMetricsOfGPUsAreServedToWhomTheAPIServerLets(t *testing.T) {
	var asked atomic.Int32
	api := httptest.NewServer(reviewer(t, &asked))
	defer api.Close()
	dir := t.TempDir()
	opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
	opts.nvml, opts.stateDir, opts.kubeletRoot = "sim:dgx-h100", dir, dir
	opts.keepSimulation()
	hardware := driver.NewHardware(driver.HardwareOptions{Open: opts.open, Clock: clock.RealClock{}, StateDir: dir})
	if _, err := hardware.Discover(t.Context()); err != nil {
		t.Fatal(err)
	}
	var logged strings.Builder
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged))))
	stop, err := serveHealth(ctx, opts, &rest.Config{Host: api.URL, ContentConfig: asJSON}, &driver.Status{}, newExporter(opts, hardware))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	address := regexp.MustCompile(`address="([^"]+)"`).FindStringSubmatch(logged.String())
	if address == nil {
		t.Fatalf("no address in %q", logged.String())
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	for _, tc := range []struct {
		token string
		code  int
		want  string
	}{
		{"", http.StatusUnauthorized, "Unauthorized"},
		{"nobody", http.StatusUnauthorized, "Unauthorized"},
		{"tenant", http.StatusForbidden, "Forbidden"},
		{"prometheus-2", http.StatusForbidden, "Forbidden"},
		{"prometheus", http.StatusOK, "stowage_gpu_util_ratio{"},
	} {
		request := reading("", "", "https://"+address[1]+gpuMetricsPath, tc.token)
		request.RequestURI = ""
		answer, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != tc.code || !strings.Contains(string(text), tc.want) || tc.code != http.StatusOK && strings.Contains(string(text), "stowage") {
			t.Errorf("token %q: %d %.100q, %v; want %d with %s", tc.token, answer.StatusCode, text, err, tc.code, tc.want)
		}
	}
}

// TestTheExporterIsAsTheFlagsSay: the GPUs of the node, by the kubelet's socket; none with an interval of 0.
func TestTheExporterIsAsTheFlagsSay(t *testing.T) {
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		args   []string
		socket string // that is asked
		none   bool
	}{
		"nothing said":        {socket: filepath.Join(dir, "pod-resources", "kubelet.sock")},
		"another socket":      {args: []string{"--pod-resources-socket=" + dir + "/k.sock"}, socket: dir + "/k.sock"},
		"no metrics":          {args: []string{"--gpu-metrics-interval=0"}, none: true},
		"a longer interval":   {args: []string{"--gpu-metrics-interval=1m"}, socket: filepath.Join(dir, "pod-resources", "kubelet.sock")},
		"the shortest one":    {args: []string{"--gpu-metrics-interval=1s"}, socket: filepath.Join(dir, "pod-resources", "kubelet.sock")},
		"another kubelet dir": {args: []string{"--kubelet-root-dir=" + dir + "/k"}, socket: filepath.Join(dir, "k", "pod-resources", "kubelet.sock")},
	} {
		t.Run(name, func(t *testing.T) {
			opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
			flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
			opts.addHardwareFlags(flags)
			opts.addRunFlags(flags)
			args := append([]string{"--nvml=sim:dgx-h100", "--kubelet-root-dir=" + dir, "--state-dir=" + dir}, tc.args...)
			if err := flags.Parse(args); err != nil {
				t.Fatal(err)
			}
			if err := opts.exporterOptions.validate(); err != nil {
				t.Fatal(err)
			}
			opts.keepSimulation()
			var logged strings.Builder
			ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged))))
			happened := &events{}
			hardware := driver.NewHardware(driver.HardwareOptions{Open: opts.open, Clock: clock.RealClock{}, StateDir: dir, Event: happened.happened})
			gpus := newExporter(opts, hardware)
			happened.exporter = gpus
			happened.happened("gpu-0000-1b-00-0", nvml.Event{Kind: nvml.EventXID, Data: 79}) // also for nobody
			if (gpus == nil) != tc.none {
				t.Fatalf("an exporter: %t", gpus != nil)
			}
			if tc.none {
				return
			}
			if _, err := hardware.Discover(t.Context()); err != nil {
				t.Fatal(err)
			}
			answer := httptest.NewRecorder()
			gpus.ServeHTTP(answer, httptest.NewRequestWithContext(ctx, http.MethodGet, gpuMetricsPath, nil))
			text := answer.Body.String()
			for _, want := range []string{"stowage_gpu_util_ratio{", `hostname="node-1"`, "stowage_gpu_exporter_pod_resources_up 0"} {
				if !strings.Contains(text, want) {
					t.Errorf("%s is not in\n%s", want, text)
				}
			}
			if !strings.Contains(logged.String(), tc.socket) {
				t.Errorf("%s was not asked: %s", tc.socket, logged.String())
			}
		})
	}
}
