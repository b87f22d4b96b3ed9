// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// gpu is what is known of one, by its last reading.
type gpu struct {
	task
	// reading is nil for a GPU that does not answer.
	reading *reading
	// problem is why, or what is missing of the reading, as it was last logged.
	problem string
	// samples belong to who reads.
	samples samples
}

// reading is what a GPU has said at a time.
type reading struct {
	at        time.Time
	condition nvml.Readings
	usage     nvml.Usage
	// partitioned: the GPU has MIG enabled, and these MIG devices. What is used of its memory is told of them.
	partitioned bool
	devices     []nvml.MIGUsage
	// rates of the GPU or, if it is partitioned, of its GPU instances by ID.
	rates map[uint32]nvml.Rates
}

// whole stands for all of a GPU among the IDs of GPU instances.
const whole = nvml.AllCompute

// samples are the last ones, by GPU instance. Rates are those since.
type samples map[uint32]lastSample

type lastSample struct {
	nvml.Sample
	// uuid of the MIG device: IDs of instances are given again.
	uuid string
}

func (s samples) close() {
	for id, last := range s {
		last.Close()
		delete(s, id)
	}
}

// read asks a GPU for everything. What it lacks is left out; of a GPU that does not answer nothing is known.
func (e *Exporter) read(ctx context.Context, of *discovery.GPU, g *gpu) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if g.samples == nil {
		g.samples = samples{}
	}
	r := &reading{at: e.opts.Clock.Now(), rates: map[uint32]nvml.Rates{}}
	var odd error
	err := e.opts.GPUs.Read(ctx, of, func(d nvml.Device) (err error) {
		odd, err = r.fill(d, g.samples)
		return err
	})
	if err != nil {
		g.samples.close()
		r, odd = nil, err
	}
	problem := ""
	if odd != nil {
		problem = odd.Error()
	}
	e.mu.Lock()
	news := problem != g.problem
	g.reading, g.problem = r, problem
	e.mu.Unlock()
	if news && problem != "" {
		klog.FromContext(ctx).Info("Metrics of a GPU are not complete", "device", of.Name, "answers", err == nil, "reason", problem)
	}
}

// fill asks the device. The error says that it does not answer, and odd what it did not tell although it could have.
func (r *reading) fill(d nvml.Device, last samples) (odd, err error) {
	if r.condition, err = d.Readings(); err != nil {
		return nil, err
	}
	if r.usage, err = d.Usage(); err != nil {
		return nil, err
	}
	mode, modeErr := d.MIGMode()
	r.partitioned = mode.Enabled
	var migErr error
	if r.partitioned {
		r.devices, migErr = d.MIGUsage()
	}
	return errors.Join(r.condition.Odd, r.usage.Odd, modeErr, migErr, r.sample(d, last)), nil
}

// sample finds out the rates since the samples before, and keeps new ones.
func (r *reading) sample(d nvml.Device, last samples) error {
	targets := map[uint32]string{}
	if !r.partitioned {
		targets[whole] = ""
	}
	for _, device := range r.devices {
		if targets[device.Instance.GPU] == "" {
			targets[device.Instance.GPU] = device.UUID
		}
	}
	var errs []error
	for id, uuid := range targets {
		var instance *uint32
		if id != whole {
			instance = &id
		}
		now, err := d.Sample(instance)
		if err != nil {
			if !errors.Is(err, nvml.ErrNotSupported) {
				errs = append(errs, err)
			}
			continue
		}
		before, known := last[id]
		last[id] = lastSample{now, uuid}
		if !known {
			continue
		}
		if before.uuid == uuid {
			// Without success there are none, as for the first sample: the driver was opened anew, or the instance made anew.
			if rates, err := now.Since(before.Sample); err == nil {
				r.rates[id] = rates
			}
		}
		before.Close()
	}
	for id, gone := range last {
		if _, there := targets[id]; !there {
			gone.Close()
			delete(last, id)
		}
	}
	return errors.Join(errs...)
}
