// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"strings"
	"time"

	"k8s.io/component-base/metrics"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// collector tells what is known when it is asked. So the series of a pod are gone with the pod.
type collector struct {
	metrics.BaseStableCollector
	exporter *Exporter
}

// DescribeWithStability implements metrics.StableCollector.
func (*collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, d := range allDescs {
		ch <- d.desc
	}
}

// CollectWithStability implements metrics.StableCollector.
func (c *collector) CollectWithStability(ch chan<- metrics.Metric) {
	for _, s := range c.exporter.series() {
		ch <- metrics.NewLazyConstMetric(s.desc.desc, s.desc.kind, s.value, s.labels...)
	}
}

// series has a value now.
type series struct {
	desc   *desc
	value  float64
	labels []string
}

// target is a GPU or a MIG device, with the labels that it has whoever holds it.
type target struct {
	at     podresources.Place
	labels []string
}

// series are all that there are now.
func (e *Exporter) series() []series {
	node := e.opts.GPUs.Node()
	e.mu.Lock()
	defer e.mu.Unlock()
	if node == nil {
		node = &discovery.Node{}
	}
	named := e.named(node)
	holders := e.holders(named)
	e.foldXIDs(node, holders.Of)
	out := &output{holders: holders.Of}
	for i := range node.GPUs {
		e.seriesOf(out, &node.GPUs[i])
	}
	for key, count := range e.xids {
		if t, ok := out.targets[key.at]; ok {
			labels := append(t.with(key.holder), key.xid)
			out.put(xidErrors, float64(count.n), labels...)
			out.put(xidTime, seconds(count.last), labels...)
		}
	}
	for _, offer := range podresources.OffersOf(e.who.allocatable, named) {
		if t, ok := out.targets[offer.At]; ok {
			out.put(pluginIDs, float64(offer.IDs), append(t.labels[:len(t.labels):len(t.labels)], offer.Resource)...)
		}
	}
	e.seriesOfItself(out, &holders)
	return out.all
}

// foldXIDs takes note of who has left. Of a GPU that does not answer it is not known which MIG devices are gone.
func (e *Exporter) foldXIDs(node *discovery.Node, current map[podresources.Place][]podresources.Holder) {
	e.xids.fold(current, func(at podresources.Place) bool {
		r := e.readingOf(at.GPU)
		if at.MIG == "" || r == nil {
			return false
		}
		for _, device := range r.devices {
			if device.UUID == at.MIG {
				return false
			}
		}
		return true
	})
}

// seriesOfItself tell how far the rest can be trusted.
func (e *Exporter) seriesOfItself(out *output, holders *podresources.Holders) {
	out.put(kubeletAnswers, oneIf(e.who.answers))
	if !e.who.podsAt.IsZero() {
		out.put(podsAge, e.opts.Clock.Since(e.who.podsAt).Seconds())
	}
	out.put(unreadableClaims, float64(e.who.unreadable))
	out.put(leftOut, float64(holders.LeftOut))
	for _, resource := range holders.Unknown {
		out.put(unknownDevices, 1, resource)
	}
}

// seriesOf are those of a GPU and of its MIG devices.
func (e *Exporter) seriesOf(out *output, of *discovery.GPU) {
	gpu := e.target(of, podresources.Place{GPU: of.Name}, of.UUID, of.Name)
	out.each(gpu, info, 1)
	r := e.readingOf(of.Name)
	if r != nil {
		out.put(readingAge, e.opts.Clock.Since(r.at).Seconds(), gpu.labels...)
		out.condition(gpu, r)
		out.usage(gpu, r)
		out.rates(gpu, r, whole)
	}
	// MIG devices that are there, and those that somebody holds, of which there may be no reading.
	devices := map[string]target{}
	for at := range out.holders {
		if at.GPU == of.Name && at.MIG != "" {
			devices[at.MIG] = e.target(of, at, at.MIG, e.who.deviceOf(of, at.MIG))
		}
	}
	if r != nil {
		for i := range r.devices {
			device := &r.devices[i]
			t := e.target(of, podresources.Place{GPU: of.Name, MIG: device.UUID}, device.UUID, e.who.deviceOf(of, device.UUID))
			devices[device.UUID] = t
			out.memory(t, device.Memory)
			out.rates(t, r, device.Instance.GPU)
		}
	}
	for _, t := range devices {
		out.each(t, info, 1)
	}
}

func (e *Exporter) target(of *discovery.GPU, at podresources.Place, uuid, device string) target {
	return target{at: at, labels: []string{uuid, of.Name, device, of.PCIBusID, of.ProductName, e.opts.NodeName}}
}

// with adds the labels of who has it, which are empty for nobody.
func (t target) with(holder podresources.Holder) []string {
	labels := make([]string, 0, len(t.labels)+5)
	return append(append(labels, t.labels...), holder.Namespace, holder.Pod, holder.Container, holder.Claim)
}

// output gathers series.
type output struct {
	holders map[podresources.Place][]podresources.Holder
	targets map[podresources.Place]target
	all     []series
}

func (o *output) put(desc *desc, value float64, labels ...string) {
	for i, label := range labels {
		labels[i] = strings.ToValidUTF8(label, "\uFFFD") // a driver in trouble says anything
	}
	o.all = append(o.all, series{desc, value, labels})
}

// each puts a series for each holder, or one for nobody.
func (o *output) each(t target, desc *desc, value float64, more ...string) {
	if o.targets == nil {
		o.targets = map[podresources.Place]target{}
	}
	o.targets[t.at] = t
	holders := o.holders[t.at]
	if len(holders) == 0 {
		holders = []podresources.Holder{{}}
	}
	for _, holder := range holders {
		o.put(desc, value, append(t.with(holder), more...)...)
	}
}

func seconds(at time.Time) float64 { return float64(at.UnixMilli()) / 1000 }

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
