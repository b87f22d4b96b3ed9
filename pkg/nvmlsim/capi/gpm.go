// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

import "C"

import (
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The performance monitor. A sample is a structure with one pointer, which C hands over as that pointer.

func gpmSampleOf(handle uintptr, pointers ...unsafe.Pointer) (nvml.GpmSample, nvml.Return) {
	return objectOf[nvml.GpmSample](handle, pointers...)
}

//export nvmlGpmSampleFree
func nvmlGpmSampleFree(sample uintptr) int32 {
	on, ret := gpmSampleOf(sample)
	if ret == nvml.SUCCESS {
		ret = on.Free()
	}
	if ret == nvml.SUCCESS {
		process.handles.drop(sample)
	}
	return int32(ret)
}

//export nvmlGpmSampleGet
func nvmlGpmSampleGet(device, sample uintptr) int32 {
	return sampled(device, sample, nvml.Device.GpmSampleGet)
}

//export nvmlGpmMigSampleGet
func nvmlGpmMigSampleGet(device uintptr, gpuInstance uint32, sample uintptr) int32 {
	return sampled(device, sample, func(on nvml.Device, into nvml.GpmSample) nvml.Return {
		return on.GpmMigSampleGet(int(gpuInstance), into)
	})
}

func sampled(device, sample uintptr, get func(nvml.Device, nvml.GpmSample) nvml.Return) int32 {
	on, ret := deviceOf(device)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	into, ret := gpmSampleOf(sample)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	return int32(get(on, into))
}

//export nvmlGpmQueryDeviceSupport
func nvmlGpmQueryDeviceSupport(device uintptr, support unsafe.Pointer) int32 {
	on, ret := deviceOf(device, support)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	if *(*uint32)(support) != nvml.GPM_SUPPORT_VERSION {
		return int32(nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	}
	value, ret := on.GpmQueryDeviceSupport()
	if ret == nvml.SUCCESS {
		put(support, value)
	}
	return int32(ret)
}

// gpmMetricsGet is C's structure. Programs of older headers have fewer metrics: only as many as they ask for are touched.
type gpmMetricsGet struct {
	version, count   uint32
	sample1, sample2 uintptr
	metrics          [nvml.GPM_METRIC_MAX]struct {
		id, ret uint32
		value   float64
		names   [3]uintptr // none is told
	}
}

//export nvmlGpmMetricsGet
func nvmlGpmMetricsGet(metricsGet unsafe.Pointer) int32 {
	l, ret := opened(metricsGet)
	if ret != nvml.SUCCESS {
		return int32(ret)
	}
	asked := (*gpmMetricsGet)(metricsGet)
	if asked.version != nvml.GPM_METRICS_GET_VERSION {
		return int32(nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	}
	question := nvml.GpmMetricsGetType{Version: asked.version, NumMetrics: asked.count}
	if question.Sample1, ret = gpmSampleOf(asked.sample1); ret != nvml.SUCCESS {
		return int32(ret)
	}
	if question.Sample2, ret = gpmSampleOf(asked.sample2); ret != nvml.SUCCESS {
		return int32(ret)
	}
	if asked.count > uint32(len(asked.metrics)) {
		return int32(nvml.ERROR_INVALID_ARGUMENT)
	}
	for i := range asked.count {
		question.Metrics[i].MetricId = asked.metrics[i].id
	}
	if ret = l.GpmMetricsGet(&question); ret != nvml.SUCCESS {
		return int32(ret)
	}
	for i := range asked.count {
		asked.metrics[i].ret, asked.metrics[i].value = question.Metrics[i].NvmlReturn, question.Metrics[i].Value
		asked.metrics[i].names = [3]uintptr{}
	}
	return int32(nvml.SUCCESS)
}
