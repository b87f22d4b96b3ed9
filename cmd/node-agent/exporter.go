// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"net/http"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/exporter"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// gpuMetricsPath is where metrics of GPUs are, by pod. They are apart from the agent's own: there are more of them, they name tenants'
// pods, and who reads them has GPUs read.
const gpuMetricsPath = "/metrics/gpus"

// exporterOptions are for the metrics of GPUs.
type exporterOptions struct {
	interval time.Duration
	// socket is the kubelet's; below --kubelet-root-dir if empty.
	socket string
}

func (o *exporterOptions) addFlags(flags *pflag.FlagSet) {
	flags.DurationVar(&o.interval, "gpu-metrics-interval", o.interval,
		fmt.Sprintf("how old readings of GPUs may be that "+gpuMetricsPath+" tells: GPUs are read when somebody asks, and no more often; at "+
			"least %s, and with 0 there are no metrics of GPUs", exporter.MinInterval))
	flags.StringVar(&o.socket, "pod-resources-socket", o.socket,
		"the kubelet's PodResources socket, which tells the pods of GPUs and what other device plugins offer; pod-resources/kubelet.sock in "+
			"--kubelet-root-dir if not given")
}

// validate names the flag that is wrong.
func (o *exporterOptions) validate() error {
	if o.interval != 0 && o.interval < exporter.MinInterval {
		return fmt.Errorf("--gpu-metrics-interval %s: want at least %s, or 0 for no metrics of GPUs", o.interval, exporter.MinInterval)
	}
	if o.socket != "" && !filepath.IsAbs(o.socket) {
		return fmt.Errorf("--pod-resources-socket %q: an absolute path is needed", o.socket)
	}
	return nil
}

// newExporter is nil if there are to be no metrics of GPUs.
func newExporter(opts *options, hardware *driver.Hardware) *exporter.Exporter {
	if opts.interval == 0 {
		return nil
	}
	return exporter.New(exporter.Options{
		NodeName: opts.nodeName,
		Driver:   driver.Name,
		GPUs:     driver.NewReader(hardware),
		Kubelet:  podresources.New(cmp.Or(opts.socket, filepath.Join(opts.kubeletRoot, "pod-resources", "kubelet.sock"))),
		Claims:   driver.ClaimsIn(opts.stateDir),
		Interval: opts.interval,
		Clock:    clock.RealClock{},
	})
}

// events are handed on to who counts them, which is known only when the hardware is.
type events struct{ exporter *exporter.Exporter }

func (e *events) happened(gpu string, event nvml.Event) {
	if e.exporter != nil {
		e.exporter.Event(gpu, event)
	}
}

// withGPUMetrics serves them beside what there is, for whom check gives http.StatusOK.
func withGPUMetrics(others, metrics http.Handler, check func(*http.Request) int) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", others)
	mux.HandleFunc(gpuMetricsPath, func(w http.ResponseWriter, r *http.Request) {
		if status := check(r); status != http.StatusOK {
			http.Error(w, http.StatusText(status), status)
			return
		}
		metrics.ServeHTTP(w, r)
	})
	return mux
}
