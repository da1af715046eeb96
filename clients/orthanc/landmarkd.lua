-- For Orthanc: asks landmarkd for the landmarks of each series that has arrived, and keeps the answer, a DICOM structured
-- report, in the study of the series. docs/orthanc.md says how to set it.

local settings = GetOrthancConfiguration().Landmarkd
local url = assert(settings and settings.Url, 'expected "Landmarkd": {"Url": ...} in the configuration')

-- What an archive matches reports with patients by; the service leaves it empty.
local SUBJECT = {
  'PatientName', 'PatientID', 'PatientBirthDate', 'PatientSex', 'StudyDate', 'StudyTime', 'StudyID', 'AccessionNumber',
  'ReferringPhysicianName',
}

local function get(path)
  return ParseJson(RestApiGet(path))
end

-- The model for a series: the first of "Models" whose conditions hold, without regard to case; nil if there is none.
local function modelOf(tags)
  for _, rule in ipairs(settings.Models or {}) do
    local isMeant = tags.Modality ~= 'SR'
    for _, name in ipairs({'Modality', 'SeriesDescription'}) do
      local pattern = rule[name]
      isMeant = isMeant and (not pattern or (tags[name] or ''):lower():find(pattern:lower()) ~= nil)
    end
    if isMeant then return rule.Model end
  end
end

-- Find the landmarks of a series and keep the report; returns the report's id, or nil if the service refused the scan.
function FindLandmarks(series, model)
  local headers = {['Content-Type'] = 'application/zip'}
  if settings.Key then headers.Authorization = 'Bearer ' .. settings.Key end
  local scan = RestApiGet('/series/' .. series .. '/archive')
  local report = HttpPost(url .. '/v1/landmarks?format=dcm&model=' .. model, scan, headers)
  if (report or ''):sub(129, 132) ~= 'DICM' then
    print('landmarkd: no landmarks of series ' .. series .. ' by ' .. model .. '; the log of landmarkd says why')
    return nil
  end
  local image = get('/series/' .. series).Instances[1]
  local tags, subject = get('/instances/' .. image .. '/simplified-tags'), {}
  for _, name in ipairs(SUBJECT) do subject[name] = tags[name] end
  local first = ParseJson(RestApiPost('/instances', report)).ID
  local change = {Replace = subject, Keep = {'StudyInstanceUID', 'SeriesInstanceUID', 'SOPInstanceUID'}, Force = true}
  local named = RestApiPost('/instances/' .. first .. '/modify', DumpJson(change, true))
  RestApiDelete('/instances/' .. first)
  return ParseJson(RestApiPost('/instances', named)).ID
end

function OnStableSeries(series, tags)
  local model = modelOf(tags)
  if model then FindLandmarks(series, model) end
end
