// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Metrics are what one program tells of itself at one time.
type Metrics map[string]*dto.MetricFamily

// ParseMetrics reads the text format.
func ParseMetrics(text []byte) (Metrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("reading metrics: %w", err)
	}
	return families, nil
}

// Sum adds the values of a gauge or a counter, or the sums of a histogram, over all of its series that have the labels, given as name and
// value in turns. Without such a series it is 0, as a series is there only after its first event.
func (m Metrics) Sum(name string, labels ...string) float64 {
	return m.add(name, labels, func(h *dto.Histogram) float64 { return h.GetSampleSum() })
}

// Count is how many observations histograms have; see Sum.
func (m Metrics) Count(name string, labels ...string) float64 {
	return m.add(name, labels, func(h *dto.Histogram) float64 { return float64(h.GetSampleCount()) })
}

func (m Metrics) add(name string, labels []string, ofHistogram func(*dto.Histogram) float64) float64 {
	total := 0.0
	for _, metric := range m[name].GetMetric() {
		if !hasLabels(metric, labels) {
			continue
		}
		total += metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
		if h := metric.GetHistogram(); h != nil {
			total += ofHistogram(h)
		}
	}
	return total
}

func hasLabels(metric *dto.Metric, labels []string) bool {
	has := map[string]string{}
	for _, pair := range metric.GetLabel() {
		has[pair.GetName()] = pair.GetValue()
	}
	for i := 0; i+1 < len(labels); i += 2 {
		if value, ok := has[labels[i]]; !ok || value != labels[i+1] {
			return false
		}
	}
	return true
}
